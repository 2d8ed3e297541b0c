"""Kernels that are compiled once, and anew when anything they are made of changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gaudi_bert
from gaudi_bert.common import compiled
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
from gaudi_bert.common.compiled import kernel
from gaudi_bert.room.helper import times

@kernel
def run(value):
    return times(value) + 1

if __name__ == "__main__":
    import gaudi_bert.room.program as program
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


def run(package: Path, module: str = "program", **environment: str) -> tuple[str, str]:
    """What a new process prints: the kernel's result, and how often it came from the disk; and what it complains of."""
    folder = package.parents[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    own = {"GAUDI_BERT_QUIET": "1", "PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    variables = {**kept, **own, "TMPDIR": str(folder), **environment}
    command = [sys.executable, "-m", f"gaudi_bert.room.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_a_kernel_is_compiled_once_and_again_when_what_it_uses_has_changed(package: Path) -> None:
    assert run(package) == ("16 0", "")
    (package / "unrelated.py").write_text("NEW = 1\n")
    assert run(package) == ("16 1", "")
    (package / "constants.py").write_text("FACTOR = 4\n")
    assert run(package) == ("21 0", "")


@pytest.mark.slow
def test_a_number_that_is_known_in_advance_is_no_type_of_its_own(package: Path) -> None:
    program = PROGRAM.replace("times(value) + 1", "times(value) + times(0) + 1").replace(
        "print(program.run(5), sum(program.run.stats.cache_hits.values()))", "print(program.run(5), len(times.signatures))"
    )
    (package / "program.py").write_text(program)
    assert run(package) == ("16 1", "")


NOTICED = """
from gaudi_bert.common import compiled
compiled.NOTICE.seconds_remaining = 1e-6
"""


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [True, False])
def test_the_first_use_says_once_that_it_compiles(package: Path, quiet: bool) -> None:
    (package / "program.py").write_text(NOTICED + PROGRAM)
    printed, said = run(package, GAUDI_BERT_QUIET="1" if quiet else "")
    assert printed == "16 0"
    assert said.count("for this machine, once: compiling 1 of 2") == (not quiet)
    assert run(package, GAUDI_BERT_QUIET="") == ("16 1", "")


@pytest.mark.slow
def test_a_kernel_that_is_stored_for_other_types_counts(package: Path) -> None:
    assert run(package) == ("16 0", "")
    (package / "main.py").write_text(NOTICED + "from gaudi_bert.room import program\nprogram.run(5.0)\n")
    said = run(package, "main", GAUDI_BERT_QUIET="")[1]
    assert said.count("for this machine, once: compiling 1 of 1") == 1


# The user's cache where the package cannot be written, the temporary folder where there is no home, or the named one.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "folder", "writable"),
    [({}, "cache", False), ({"XDG_CACHE_HOME": "/dev/null"}, ".", False), ({"NUMBA_CACHE_DIR": "named"}, "named", True)],
)
def test_where_kernels_go(package: Path, environment: dict[str, str], folder: str, writable: bool) -> None:
    if not writable:
        (package / "__pycache__").write_text("a file in the place of the folder")
    assert run(package, **environment) == ("16 0", "")
    assert list((package.parents[1] / folder).rglob("program.run-*.nbi"))
    assert not list(package.rglob("*.nb[ic]"))
    for shared in [*package.parents[1].glob("gaudi-bert-kernels-*"), *package.parents[1].glob("cache/gaudi-bert/kernels")]:
        assert shared.stat().st_mode & 0o777 == 0o700
    if folder == "named":
        assert run(package, **environment) == ("16 1", "")


@pytest.mark.slow
@pytest.mark.parametrize("taken", ["by a link", "by another user", "open to all"])
def test_no_kernel_goes_where_others_may_put_machine_code(package: Path, taken: str) -> None:
    (package / "__pycache__").write_text("a file in the place of the folder")
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
    printed, complaint = run(package, XDG_CACHE_HOME="/dev/null")
    assert printed == "16 0"
    assert "(others may write there); set NUMBA_CACHE_DIR" in complaint
    assert not [*folder.iterdir(), *elsewhere.iterdir()]


@pytest.mark.slow
def test_without_any_place_one_line_says_so(package: Path) -> None:
    printed, complaint = run(package, NUMBA_CACHE_DIR="/dev/null/kernels")
    assert printed == "16 0"
    assert complaint.startswith("gaudi-bert: compiled kernels cannot be saved, ")
    assert complaint.endswith("set NUMBA_CACHE_DIR to a folder that can be written\n")
    assert complaint.count("\n") == 1


@pytest.mark.slow
def test_a_kernel_whose_argument_has_another_type_name_now_is_compiled_again(package: Path) -> None:
    """numba reads the stored types before it sees that the sources have changed."""
    program = PROGRAM.replace(
        "\n@kernel", "\nfrom typing import NamedTuple\nclass Old(NamedTuple):\n    size: int\n\n@kernel"
    )
    program = program.replace("times(value)", "times(value.size)").replace("run(5)", "run(program.Old(5))")
    (package / "program.py").write_text(program)
    assert run(package) == ("16 0", "")
    (package / "program.py").write_text(program.replace("Old", "New"))
    assert run(package) == ("16 0", "")
    assert run(package) == ("16 1", "")


def test_the_digest_covers_what_is_imported_through_other_files() -> None:
    pricing, solver = PACKAGE / "packing" / "pricing.py", PACKAGE / "packing" / "nnls_solver.py"
    assert compiled.source_digest(pricing) != compiled.source_digest(solver)
    assert len(compiled.source_digest(solver)) == 64


CPUINFO = "processor\t: 0\nflags\t\t: avx2 bmi1 bmi2 f16c fma movbe pclmulqdq popcnt sse4_2 more\n"


@pytest.mark.parametrize(("lost", "kept"), [("", True), ("avx2 ", False)])
def test_an_older_processor_than_the_images_compiles_for_itself(lost: str, kept: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO.replace(lost, "") if lost else CPUINFO)
    code = (
        "import os, numba; from pathlib import Path; from gaudi_bert.common import compiled;"
        f"compiled.fall_back_to_own_processor(compiled.processor_flags(Path({str(tmp_path / 'cpuinfo')!r})));"
        "print('NUMBA_CPU_NAME' in os.environ, numba.config.CPU_NAME, numba.config.CPU_FEATURES)"
    )
    done = run_python(code, NUMBA_CPU_NAME="x86-64-v3", NUMBA_CPU_FEATURES="+sse4.2,+pclmul", PYTHONPATH=str(PACKAGE.parent))
    assert done.stdout.split() == (["True", "x86-64-v3", "+sse4.2,+pclmul"] if kept else ["False", "None", "None"])


def test_no_flags_are_known_of_an_unknown_machine(tmp_path: Path) -> None:
    assert compiled.processor_flags(tmp_path / "absent") == frozenset()
