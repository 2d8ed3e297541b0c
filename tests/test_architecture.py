"""Rules that CONTRIBUTING promises, read from the syntax: where imports point, who opens files, how results are compared."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "gaudi_bert"


@dataclass(frozen=True)
class Import:
    """A module, or a name inside one, that a file of the package imports; `late` is inside a function."""

    path: Path
    line: int
    name: str
    late: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.name}"


@functools.cache
def syntax_trees() -> list[tuple[Path, ast.Module]]:
    """Every file of the package, relative to it, and its syntax."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [(path.relative_to(PACKAGE), ast.parse(path.read_text(encoding="utf-8"))) for path in files]


def file_imports(path: Path, tree: ast.AST, late: bool = False) -> Iterator[Import]:
    """The imports of a file, wherever they stand, but for those that only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (Import(path, node.lineno, alias.name, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = "." * node.level + (node.module or "")
            yield from (Import(path, node.lineno, f"{parent}.{alias.name}", late) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            yield from (Import(path, node.lineno, name.value, True) for name in node.args if isinstance(name, ast.Constant))
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from file_imports(path, node, late or inside)


@functools.cache
def own_imports() -> list[tuple[Import, Path]]:
    """Every import of a file of this package by another, and the imported file."""
    found = []
    for path, tree in syntax_trees():
        for item in file_imports(path, tree):
            parts = item.name.split(".")
            if parts[0] == PACKAGE.name and parts[1:] != ["__version__"]:
                found.append((item, _file_of(parts[1:])))
    return found


def _file_of(parts: list[str]) -> Path:
    """The file of a dotted name below the package: the longest part of it that is a file or a folder."""
    for end in range(len(parts), 0, -1):
        path = Path(*parts[:end])
        if (PACKAGE / path).is_dir():
            return path / "__init__.py"
        if (PACKAGE / path).with_suffix(".py").is_file():
            return path.with_suffix(".py")
    return Path("__init__.py")


def rooms() -> dict[str, set[str]]:
    """Which rooms each room may import from, besides itself and the standard library: the table of CONTRIBUTING."""
    page = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found: dict[str, set[str]] = {"__init__": {"packing"}, "__main__": {"cli"}}
    above: set[str] = set()
    for room, allowed in re.findall(r"^\| `(\w+)/`.*\| ([^|]+) \|$", page, re.MULTILINE):
        named = {name.strip() for name in allowed.rpartition(" but ")[2].split(",")}
        found[room] = above - named if allowed.startswith("all ") else named - {"nothing of ours"}
        above.add(room)
    return found


# Modules that are slow to load or that some environments lack: where a file may import them when it is itself imported,
# and where functions may besides: in a room, a folder or a file.
HEAVY: dict[str, tuple[set[str], set[str]]] = {
    "numba": ({"common/compiled", "common/crc32c", "tfrecords", "reading", "tables", "packing"}, set()),
    "llvmlite": ({"common/compiled", "common/crc32c", "tfrecords/wire"}, set()),
    "scipy": (set(), {"tasks/ranking"}),
    "seqeval": (set(), {"tasks/classification"}),
    "sklearn": (set(), {"tasks/classification"}),
    "highspy": (set(), {"packing/linear_program"}),
    "tokenizers": (set(), {"corpus/vocabulary", "rows/tokenizer", "rows/tokenizer_files"}),
    "tensorflow": ({"engines/tensorflow"}, set()),
    "horovod": (set(), {"engines/tensorflow/engine", "runners/training_processes"}),
    "habana_frameworks": (set(), {"engines"}),
    "safetensors": ({"training/checkpoint", "tasks/task_models", "tasks/export", "encoders/encoder_weights"}, {"training"}),
    "matplotlib": (set(), {"reporting"}),
    "jinja2": (set(), {"reporting/report"}),
    "h5py": (set(), {"tfrecords/wire/hdf5"}),
    "pyarrow": (set(), {"common/arrow", "tables", "rows", "tasks/predict"}),
    **dict.fromkeys(
        ("fsspec", "s3fs", "botocore", "aiohttp", "gcsfs", "google", "adlfs", "azure"), (set(), {"artefacts/object_store"})
    ),
    "docker": (set(), {"runners/docker"}),
    "kubernetes": (set(), {"runners/kubernetes"}),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "uvloop", "prometheus_client"), ({"serving"}, set())),
    "torch": ({"encoders", "pytorch", "engines/pytorch"}, set()),
    "transformers": ({"encoders", "pytorch", "engines/pytorch"}, {"rows/tokenizer"}),
}


def within(path: Path, places: set[str]) -> bool:
    """Whether a file is one of `places`, or below one."""
    names = path.with_suffix("").parts
    return any("/".join(names[:end]) in places for end in range(1, len(names) + 1))


def room_of(path: Path) -> str:
    """The folder of the package that contains the file."""
    return path.parts[0].removesuffix(".py")


def test_every_room_is_known() -> None:
    assert {room_of(path) for path, _ in syntax_trees()} == set(rooms())


def test_imports_between_rooms_point_one_way() -> None:
    allowed = rooms()
    both = [(str(found), room_of(found.path), room_of(target)) for found, target in own_imports()]
    wrong = [found for found, room, other in both if other not in {room, *allowed[room]}]
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_itself_over_others() -> None:
    imports: dict[Path, set[Path]] = {path: set() for path, _ in syntax_trees()}
    for found, target in own_imports():
        imports[found.path].add(target)
    graphlib.TopologicalSorter(imports).prepare()  # which names a circle


def test_no_relative_imports() -> None:
    wrong = [str(item) for path, tree in syntax_trees() for item in file_imports(path, tree) if item.name.startswith(".")]
    assert not wrong


def test_heavy_modules_are_imported_where_they_belong() -> None:
    wrong = []
    for path, tree in syntax_trees():
        for found in file_imports(path, tree):
            name = found.name.split(".")[0]
            if name in HEAVY:
                at_import, in_functions = HEAVY[name]
                if not within(path, at_import | in_functions if found.late else at_import):
                    wrong.append(f"{found} {'in a function' if found.late else 'on import'}")
    assert not wrong, "\n".join(wrong)


def test_no_function_swallows_everything_or_asserts_on_input() -> None:
    wrong = []
    for path, tree in syntax_trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                names = ast.unparse(node.type) if node.type else "everything"
                broad = node.type is None or names in ("Exception", "BaseException")
                if broad and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                    wrong.append(f"{path}:{node.lineno} swallows {names}")
            if isinstance(node, ast.Assert):
                wrong.append(f"{path}:{node.lineno} asserts")
    assert not wrong, "\n".join(wrong)


# What a process has one of, and a path or a thread must find: which folders are mounted, and who writes on the terminal.
GLOBAL_STATE = {"common/files.py: _MIRRORS"}


def global_state(path: Path, tree: ast.Module) -> Iterator[str]:
    """The names at the top of a file that begin empty to be filled, or that functions bind again."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from (f"{path.as_posix()}: {name}" for name in node.names)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            made = ast.unparse(node.value)
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if made in ("{}", "[]") or re.fullmatch(
                r"(dict|list|set|deque|(\w+\.)?(\w*Dict\w*|Event|R?Lock|local|ContextVar|Counter))\(.*", made
            ):
                yield f"{path.as_posix()}: {ast.unparse(target)}"


def test_no_state_is_hidden_in_a_module() -> None:
    assert {name for path, tree in syntax_trees() for name in global_state(path, tree)} == GLOBAL_STATE
    code = "_SEEN: dict[str, int] = {}\n_LOCK = threading.Lock()\nUNITS = {'B': 1}\ndef f():\n    global count\n"
    assert [name[6:] for name in global_state(Path("x.py"), ast.parse(code))] == ["count", "_SEEN", "_LOCK"]


# --- files for reading have an end


OPENERS = {"open", "read_text", "read_bytes"}
# Who opens files otherwise, and why: files of this installation and of the system, and what only grows or is locked.
OTHERWISE = {
    "common/files.py", "common/compiled.py", "common/processor.py", "common/errors.py",
    "common/progress.py", "corpus/python_texts.py", "runners/stop_ranks.py",
    "runners/kubernetes/manifests.py", "runners/training_processes.py", "artefacts/object_store.py",
    "training/logs.py", "tables/tokenize.py",
}  # fmt: skip
NO_FILES = {"os", "gzip", "self", "webbrowser", "tarfile", "model", "files"}


def opened(tree: ast.AST) -> Iterator[int]:
    """The lines of a file's syntax that open a file by its name."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id == "open":
            yield from [] if "check_regular_file(" in ast.unparse(node) else [node.lineno]
        elif isinstance(function, ast.Attribute) and function.attr in OPENERS:
            owner = ast.unparse(function.value).split(".")[0]
            yield from [] if owner in NO_FILES else [node.lineno]


def test_all_code_reads_files_by_one_function() -> None:
    found = {path.as_posix(): list(opened(tree)) for path, tree in syntax_trees() if path.as_posix() not in OTHERWISE}
    assert {path: lines for path, lines in found.items() if lines} == {}


# --- two computations agree to a bound, or one that is run twice is identical: by tests.builders.agree alone


TESTS = Path(__file__).parent
HOME = TESTS / "builders" / "agree.py"
OTHER_WAYS = {"approx", "allclose", "assert_allclose", "assert_almost_equal", "assert_array_almost_equal", "isclose"}


def test_what_was_computed_is_compared_by_agree_or_identical() -> None:
    wrong = [
        f"{path.relative_to(TESTS)}:{node.lineno}: {name}"
        for path in TESTS.rglob("*.py")
        if path != HOME
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute | ast.Name)
        and (name := node.attr if isinstance(node, ast.Attribute) else node.id) in OTHER_WAYS
    ]
    assert wrong == []
