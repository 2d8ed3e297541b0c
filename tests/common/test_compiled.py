"""Kernels that are compiled once, and anew when anything they are made of changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gaudi_bert
from tests.builders.command_line import run_python

PACKAGE = Path(gaudi_bert.__file__).resolve().parent

CONSTANTS = "FACTOR = 3\n"
HELPER = """
from gaudi_bert.common.compiled import kernel
from gaudi_bert.room.constants import FACTOR

@kernel
def times(value):
    return FACTOR * value
"""
PROGRAM = """
import importlib
from gaudi_bert.common.compiled import kernel
from gaudi_bert.room.helper import times

@kernel
def run(value):
    return times(value) + 1

if __name__ == "__main__":
    program = importlib.import_module(__spec__.name)
    print(program.run(5), sum(program.run.stats.cache_hits.values()))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small package of the same name, with a kernel that calls one of another file, which uses a constant of a third."""
    room = tmp_path / "gaudi_bert" / "room"
    room.mkdir(parents=True)
    shutil.copytree(PACKAGE / "common", tmp_path / "gaudi_bert" / "common", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (room, room.parent):
        (folder / "__init__.py").write_text("")
    (room / "constants.py").write_text(CONSTANTS)
    (room / "helper.py").write_text(HELPER)
    (room / "program.py").write_text(PROGRAM)
    (room / "unrelated.py").write_text("")
    return room


def run(package: Path, module: str = "program", *arguments: str, **environment: str) -> tuple[str, str]:
    """What a new process prints: the kernel's result, and how often it came from the disk; and what it complains of."""
    folder = package.parents[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    own = {"GAUDI_BERT_QUIET": "1", "PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    variables = {**kept, **own, "TMPDIR": str(folder), **environment}
    command = [sys.executable, "-m", f"gaudi_bert.room.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_a_kernel_is_compiled_once_and_again_when_what_it_uses_has_changed(package: Path) -> None:
    printed, said = run(package, GAUDI_BERT_QUIET="")
    assert (printed, said.count("\n")) == ("16 0", 1), "the first use says once that it compiles"
    (package / "unrelated.py").write_text("NEW = 1\n")
    assert run(package, GAUDI_BERT_QUIET="") == ("16 1", "")
    (package / "constants.py").write_text("FACTOR = 4\n")
    assert run(package) == ("21 0", "")
    (package / "moved").mkdir()
    (package / "program.py").rename(package / "moved" / "program.py")
    assert run(package, "moved.program") == ("21 0", ""), "code of a module that is gone may name its types"
    assert not list(package.rglob("*.nb[ic]"))  # an installation may be read-only


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "folder"),
    [({}, "cache/gaudi-bert/kernels"), ({"XDG_CACHE_HOME": "/dev/null"}, f"gaudi-bert-kernels-{os.getuid()}"),
     ({"NUMBA_CACHE_DIR": "named"}, "named/gaudi-bert")],
)  # fmt: skip
def test_kernels_go_to_the_named_folder_the_users_or_the_temporary_one(
    package: Path, environment: dict[str, str], folder: str
) -> None:
    assert run(package, **environment) == ("16 0", "")
    kernels = package.parents[1] / folder
    assert list(kernels.rglob("program.run-*.nbi"))
    assert kernels.stat().st_mode & 0o777 == 0o700
    assert run(package, **environment) == ("16 1", "")


@pytest.mark.slow
@pytest.mark.parametrize("taken", ["by a link", "by another user", "open to all"])
def test_no_kernel_goes_where_others_may_put_machine_code(package: Path, taken: str) -> None:
    folder, elsewhere = package.parents[1] / f"gaudi-bert-kernels-{os.getuid()}", package.parents[1] / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if taken == "by a link":
        folder.symlink_to(elsewhere)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    if taken == "by another user":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder to another user")
        folder.chmod(0o700)
        os.chown(folder, 12345, 12345)
    for _ in range(2):
        printed, complaint = run(package, XDG_CACHE_HOME="/dev/null")
        assert printed == "16 0"
        assert str(folder) in complaint
    assert complaint.count("\n") == 1
    assert not [*folder.iterdir(), *elsewhere.iterdir()]


OF_A_TYPE = """
import sys
from gaudi_bert.room import program
value = eval(sys.argv[1])
print(program.run(value), sum(program.run.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_gives_what_it_holds(package: Path) -> None:
    """As in an image that another user runs."""
    assert run(package) == ("16 0", "")
    lock = package.parents[1] / "cache" / "gaudi-bert" / "kernels" / "lock"
    lock.unlink()
    lock.mkdir()  # nothing can be saved, not even by root
    (package / "typed.py").write_text(OF_A_TYPE)
    assert run(package) == ("16 1", "")
    printed, complaint = run(package, "typed", "5.5")
    assert printed == "17.5 0"
    assert complaint.count("\n") == 1


@pytest.mark.slow
def test_processes_that_compile_at_once_for_different_arguments_keep_their_code_apart(package: Path) -> None:
    (package / "typed.py").write_text(OF_A_TYPE)
    values = {"5": "16", "5.5": "17.5", "5j": "(1+15j)", "__import__('numpy').float32(5.5)": "17.5"}
    with ThreadPoolExecutor(len(values)) as pool:
        first = list(pool.map(lambda value: run(package, "typed", value), values))
    assert [printed.split()[0] for printed, _ in first] == list(values.values())
    again = [run(package, "typed", value) for value in values]
    assert again == [(f"{result} 1", "") for result in values.values()]


@pytest.mark.parametrize("has_avx2", [True, False])
def test_an_older_processor_than_the_images_compiles_for_itself(has_avx2: bool) -> None:
    code = (
        "import os, numba; from llvmlite import binding; features = binding.get_host_cpu_features()\n"
        f"features.update({{**dict.fromkeys(features, True), 'avx2': {has_avx2}}})\n"
        "binding.get_host_cpu_features = lambda: features\n"
        "from gaudi_bert.common import compiled\n"
        "print('NUMBA_CPU_NAME' in os.environ, numba.config.CPU_NAME, numba.config.CPU_FEATURES)"
    )
    done = run_python(code, NUMBA_CPU_NAME="x86-64-v3", NUMBA_CPU_FEATURES="+sse4.2,+pclmul", PYTHONPATH=str(PACKAGE.parent))
    assert done.stdout.split() == (["True", "x86-64-v3", "+sse4.2,+pclmul"] if has_avx2 else ["False", "None", "None"])
