"""The layout that CONTRIBUTING promises: imports point one way, heavy ones stay where they belong. Read from the syntax."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.builders.imports import circles, file_imports, own_imports, syntax_trees

# Which rooms a room may import from, besides itself and the standard library. `common` is the floor under all of them.
ROOMS = {
    "common": set(),
    "config": {"common"},
    "artefacts": {"common", "config"},
    "packing": {"common"},
    "reading": {"common"},
    "tfrecords": {"common", "config", "artefacts", "packing", "reading"},
    "corpus": {"common", "config", "artefacts", "tfrecords"},
    "rows": {"common", "config", "packing", "corpus"},
    "tables": {"common", "config", "artefacts", "packing", "reading", "tfrecords", "corpus", "rows"},
    "model": {"common"},
    "training": {"common", "config", "artefacts", "reading", "tfrecords", "model"},
    "pytorch": {"common", "config", "artefacts", "reading", "tfrecords", "rows", "tables", "training"},
    "tasks": {"common", "config", "artefacts", "packing", "corpus", "rows", "tables", "model", "training", "pytorch"},
    "reporting": {"common", "config", "artefacts", "packing", "tfrecords", "rows", "tables"},
    "runners": {
        *("common", "config", "artefacts", "packing", "reading", "tfrecords", "corpus", "tables", "training", "tasks"),
        "reporting",
    },
    "cli": {
        *("common", "config", "artefacts", "tfrecords", "corpus", "tables", "training", "pytorch", "tasks", "reporting"),
        "runners",
    },
    "__main__": {"cli"},
    "__init__": {"packing"},
}

# The storeys of a room, from the lowest: folders, and files that stand above one. Each may import what comes before it.
# Files that are not named are the room's floor, and import no storey.
STOREYS = {
    "config": ("values", "problems", "sections", "places", "models", "pipeline"),
    "packing": ("heuristics", "nnls_solver", "long_packs", "nnls", "exact", "algorithms", "pack_lengths", "estimate"),
    "tfrecords": (
        *("wire", "files", "scanning", "arrays", "random_access", "packed_folder", "packed_shards"),
        *("packed_proof", "histogram", "plan", "write", "verify", "inspect", "pack", "convert", "vendor_packs"),
    ),
    "rows": ("reading", "tokenizer", "tokenizing", "packs", "window_plan", "answers"),
    "tables": (
        *("rows", "token_tables", "write_packs", "groups", "packed_parquet", "compare"),
        *("verify", "pack", "import_tables", "tokenize"),
    ),
    "training": (
        *("distributed", "input", "objective", "run_plan", "metrics", "tensorflow", "evaluator"),
        *("results", "checkpoint", "stored_inputs", "mlperf", "run", "loop", "weights"),
        *("train", "evaluate", "verify_model", "check_graph"),
    ),
    "tasks": ("kinds", "task_data", "objective", "models", "finetune", "predict", "embed"),
    "runners": ("docker", "kubernetes", "doctor"),
    "cli": ("data_commands", "estimate_commands", "model_commands", "pipeline_commands", "cluster_commands", "main"),
}

# Modules that are slow to load or that some environments lack: where a file may import them when it is itself imported,
# and where functions may besides: in a room, a folder or a file.
HEAVY: dict[str, tuple[set[str], set[str]]] = {
    "numba": ({"common/compiled", "common/crc32c", "common/memory", "tfrecords", "reading", "tables", "packing"}, set()),
    "llvmlite": ({"common/compiled", "common/crc32c", "common/memory", "tfrecords/wire"}, set()),
    "scipy": (set(), {"tasks/kinds/classification"}),
    "seqeval": (set(), {"tasks/kinds/classification"}),
    "sklearn": (set(), {"tasks/kinds/classification"}),
    "highspy": (set(), {"packing/exact/linear_program"}),
    "tokenizers": (set(), {"corpus/vocabulary", "rows/tokenizer"}),
    "tensorflow": ({"model", "tasks", "training"}, {"training/verify_model"}),
    "horovod": (set(), {"training/distributed"}),
    "habana_frameworks": (set(), {"training/tensorflow/device"}),
    "safetensors": ({"training/checkpoint", "tasks/models", "pytorch/model_folder"}, {"training"}),
    "matplotlib": (set(), {"reporting"}),
    "jinja2": (set(), {"reporting/page"}),
    "h5py": (set(), {"tfrecords/wire/hdf5"}),
    "pyarrow": (set(), {"common/arrow", "tables", "rows"}),
    **dict.fromkeys(
        ("fsspec", "s3fs", "botocore", "aiohttp", "gcsfs", "google", "adlfs", "azure"), (set(), {"artefacts/store/objects"})
    ),
    "docker": (set(), {"runners/docker/engine"}),
    "kubernetes": (set(), {"runners/kubernetes", "runners/doctor/cluster"}),
    "torch": ({"pytorch"}, set()),
    "transformers": ({"pytorch"}, set()),
}


def within(path: Path, places: set[str]) -> bool:
    """Whether a file is one of `places`, or below one."""
    names = path.with_suffix("").parts
    return any("/".join(names[:end]) in places for end in range(1, len(names) + 1))


def room_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def test_every_room_is_known() -> None:
    assert {room_of(path) for path, _ in syntax_trees()} == set(ROOMS)


def test_imports_between_rooms_point_one_way() -> None:
    wrong = [
        str(found)
        for found, target in own_imports()
        if room_of(target) not in {room_of(found.path), *ROOMS[room_of(found.path)]}
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", STOREYS)
def test_imports_inside_a_room_point_down(room: str) -> None:
    storeys = STOREYS[room]
    files = {path.parts[1].removesuffix(".py") for path, _ in syntax_trees() if room_of(path) == room}
    missing = set(storeys) - files
    assert not missing, f"not there any more: {missing}"

    def height(path: Path) -> int:
        name = path.parts[1].removesuffix(".py")
        return storeys.index(name) if name in storeys else -1

    wrong = [
        f"{found}: {target.parts[1]} stands above it"
        for found, target in own_imports()
        if room_of(found.path) == room_of(target) == room and found.path.parts[1] != "__init__.py"
        if height(target) > height(found.path)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_itself_over_others() -> None:
    imports: dict[Path, set[Path]] = {path: set() for path, _ in syntax_trees()}
    for found, target in own_imports():
        imports[found.path].add(target)
    assert circles(imports) == []


def test_circles_are_found() -> None:
    a, b, c, d = (Path(name) for name in "abcd")
    assert circles({a: {b}, b: {c}, c: {a}, d: {a}}) == [[a, b, c]]
    assert circles({a: {b, c}, b: {d}, c: {d}, d: set()}) == []
    assert circles({a: {a}, b: {c}, c: {b}, d: {b}}) == [[a], [b, c]]


def test_imports_are_seen_wherever_they_stand() -> None:
    code = """
import one
try:
    import two.three
except ImportError:
    from two import four
if TYPE_CHECKING:
    import unseen
def function():
    with suppress(ImportError):
        import five, six
class Late:
    import seven
    def method(self):
        from eight import nine
"""
    found = list(file_imports(Path("x.py"), ast.parse(code)))
    assert [item.name for item in found if not item.late] == ["one", "two.three", "two.four", "seven"]
    assert [item.name for item in found if item.late] == ["five", "six", "eight.nine"]


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
