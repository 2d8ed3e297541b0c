"""Around TensorFlow: what it reads from the environment while it is loaded, and what it prints below Python."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from gaudi_bert.common.files import explained_os_errors
from gaudi_bert.common.threads import limited_cores

# TensorFlow reports every step of its graph optimisers, and quotes damaged records; our own errors say it in one line.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}

# TensorFlow's own default is to use oneDNN only where the processor has AVX512_VNNI or better. Its own products are compiled
# for AVX without FMA: where there is AVX2, oneDNN's are one and a half times as fast, and batched ones nearly three times.
_ONEDNN = {"TF_ENABLE_ONEDNN_OPTS": "1"}

# TensorFlow counts the cores that it may run on, and knows nothing of a container's share of their time.
INTRA_OP_THREADS = "TF_NUM_INTRAOP_THREADS"


def prepare_tensorflow(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what no user, image or launcher has set; call it before TensorFlow is imported, it has no effect later.

    On a host with the Gaudi software the choice of kernels belongs to the vendor's TensorFlow: what oneDNN rewrites in a
    graph is not for the card.
    """
    has_gaudi = importlib.util.find_spec("habana_frameworks") is not None
    cores = limited_cores()
    threads = {} if cores is None else dict.fromkeys((INTRA_OP_THREADS, "TF_NUM_INTEROP_THREADS"), str(cores))
    for name, value in {**QUIET, **threads, **({} if has_gaudi else _ONEDNN)}.items():
        environment.setdefault(name, value)


@contextmanager
def without_keras() -> Iterator[None]:
    """Inside the block, TensorFlow is imported without Keras, which it would load for others to use, and pandas with it.

    Nothing of ours uses Keras, and it takes more than a third of the time. TensorFlow does without where there is
    none, and afterwards Keras can be imported as ever.
    """
    if "tensorflow" in sys.modules or "keras" in sys.modules:
        yield
        return
    sys.modules["keras"] = None  # type: ignore[assignment]  # what Python takes for "there is none"
    try:
        yield
    finally:
        sys.modules.pop("keras", None)


# --- what libraries write to standard error below Python

_STANDARD_ERROR = 2


@contextmanager
def native_lines_to(log: Path) -> Iterator[None]:
    """Append to `log` what is written to file descriptor 2; what Python prints to `sys.stderr` goes where it went before.

    A stream that was taken from `sys.stderr` before is on descriptor 2, so take it again inside.
    """
    python_stream = sys.stderr
    with explained_os_errors(log, "write"):
        file = log.open("ab")
    with file, os.fdopen(os.dup(_STANDARD_ERROR), "w", buffering=1) as terminal:
        if _is_on(python_stream, _STANDARD_ERROR):
            python_stream.flush()
            sys.stderr = terminal
        os.dup2(file.fileno(), _STANDARD_ERROR)
        try:
            yield
        finally:
            os.dup2(terminal.fileno(), _STANDARD_ERROR)
            sys.stderr = python_stream


def _is_on(stream: TextIO | None, descriptor: int) -> bool:
    """Whether `stream` writes to `descriptor`; one in memory writes to none."""
    try:
        return stream is not None and stream.fileno() == descriptor
    except (OSError, ValueError):
        return False
