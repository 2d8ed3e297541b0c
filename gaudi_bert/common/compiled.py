"""How every numeric kernel is compiled: once per machine, vectorised, without the interpreter lock.

numba keeps the machine code, in a folder that is named by the SHA-256 of the kernel's file, of all files of this package
that it imports, directly or not, and of the compiler's versions: numba's own check overlooks a callee or a constant that
changed in another file. The folder is in `NUMBA_CACHE_DIR`, if set (images set it, and compile when they are built), else in
the user's cache folder, else in the temporary folder. What is in it is executed, so one into which others may write is
refused; where there is none, or where it cannot be written, each process compiles for itself and reports that in one line.

An image compiles for a named type of processor, so that its kernels serve every machine (`NUMBA_CPU_NAME=x86-64-v3`); on a
processor that lacks the type's instructions, kernels are compiled for that machine alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba
import numpy
from numba import njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache

Function = TypeVar("Function", bound=Callable[..., Any])

QUIET = "GAUDI_BERT_QUIET"
"""A variable that, if set, suppresses the messages about compiling; so does the level of the logger gaudi_bert."""

_PACKAGE = Path(__file__).resolve().parents[1]
_LOGGER = logging.getLogger(_PACKAGE.name)
_IMPORT = re.compile(rf"^\s*(?:from|import)\s+({_PACKAGE.name}(?:\.\w+)*)", re.MULTILINE)
_VERSIONS = f"{numba.__version__} {llvmlite.__version__} {numpy.__version__}"

_IMAGE_PROCESSOR = "x86-64-v3"
# That type of processor, with the carry-less multiplication that images add to it, in the words of /proc/cpuinfo.
_IMAGE_PROCESSOR_FLAGS = frozenset(["avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "pclmulqdq", "popcnt", "sse4_2"])

# A maximum may run in vector lanes: no kernel uses infinities or NaN. Sums keep their order and are not fused with products,
# so that results are the same on every processor.
_FLOAT_RELAXATIONS = frozenset({"nnan", "ninf", "nsz"})


def kernel(function: Function) -> Function:
    """Compile `function` at its first call, or load what an earlier process compiled from the same sources.

    Array indices and integer divisors are not checked: the caller must make sure that they are right. Values are written by
    loops, not `target[:] = values`: the latter compiles the error for unequal shapes, with all that formats a text, for
    seconds. So do `np.sum`, `np.max` and `np.append`, though less.
    """
    return _compiled(function)


def borrowing_kernel(function: Function) -> Function:
    """Compile, as `kernel` does, a function that makes no array and returns none: references to arrays are then not counted.

    Where a function runs for every record or sequence, counting takes longer than much of its work.
    """
    return _compiled(function, _nrt=False)


def inner_kernel(function: Function) -> Function:
    """A borrowing kernel that only other kernels call: it has no entry from Python, which takes long to compile."""
    return _compiled(function, _nrt=False, no_cpython_wrapper=True)


def _compiled(function: Function, **options: Any) -> Function:
    relaxations = set(_FLOAT_RELAXATIONS)
    options |= {
        "nogil": True,
        "boundscheck": False,
        "error_model": "numpy",
        "fastmath": relaxations,
        "no_cfunc_wrapper": True,
    }
    compiled = njit(**options)(function)
    if not numba.config.DISABLE_JIT:
        if _kernels_folder() is not None:
            compiled._cache = _KernelCache(function)  # noqa: SLF001 - numba has no other way to choose a cache
        compiled.get_call_template = functools.partial(_call_template, compiled.get_call_template)
    result: Function = compiled
    return result


def _call_template(own: Callable[..., Any], types: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """For a kernel that another one calls: a number that is known when it is compiled has no separate type."""
    return own(tuple(map(numba.types.unliteral, types)), {name: numba.types.unliteral(kind) for name, kind in named.items()})


def inlined_kernel(function: Function) -> Function:
    """A small function that becomes part of every kernel that calls it."""
    compiled: Function = njit(inline="always")(function)
    return compiled


# --- the cache


@functools.cache
def _source(file: Path) -> bytes:
    return file.read_bytes()


def _imported_files(file: Path) -> Iterator[Path]:
    """Files of this package that `file` imports; all files of a folder where it imports from the folder as such."""
    for name in _IMPORT.findall(_source(file).decode("utf-8")):
        path = _PACKAGE.parent.joinpath(*name.split("."))
        module = path.with_suffix(".py")
        yield from [module] if module.is_file() else sorted(path.rglob("*.py"))


@functools.cache
def source_digest(file: Path) -> str:
    """Return the SHA-256 of what the machine code of kernels in `file` depends on.

    A digest of the package would be simpler, and compile all kernels again after every edit, which takes minutes.
    """
    files, waiting = {file}, [file]
    while waiting:
        new = set(_imported_files(waiting.pop())) - files
        files |= new
        waiting += new
    digest = hashlib.sha256(_VERSIONS.encode())
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(_source(path)).digest())
    return digest.hexdigest()


@functools.cache
def _kernels_folder() -> Path | None:
    """Return the folder of all machine code; None, with a warning, where other users can write to every folder."""
    folders, refusals = [], []
    if numba.config.CACHE_DIR:
        folders.append(Path(numba.config.CACHE_DIR, "gaudi-bert"))
    else:
        user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if os.path.isabs(user_cache):  # a user without a home has none
            folders.append(Path(user_cache, "gaudi-bert", "kernels"))
        with contextlib.suppress(OSError):  # without a writable temporary folder
            folders.append(Path(tempfile.gettempdir(), f"gaudi-bert-kernels-{os.getuid()}"))
    for folder in folders:
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            status = folder.lstat()
        except OSError as error:
            refusals.append(f"{folder} ({error.strerror})")
            continue
        is_ours = status.st_uid == os.getuid() or (numba.config.CACHE_DIR and status.st_uid == 0)  # an image's is root's
        if is_ours and stat.S_ISDIR(status.st_mode) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return folder
        refusals.append(f"{folder} (others may write there)")
    _say_not_saved(", ".join(refusals))
    return None


class _Locator:
    """The folder of a kernel's machine code, under the names by which numba asks for it."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._line, self._digest = function.__code__.co_firstlineno, source_digest(Path(file).resolve())
        self._py_file = file  # numba names it in a warning
        self._folder = Path(_kernels_folder() or "", f"{Path(file).stem}-{self._digest}")

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _Locator:
        return cls(function, file)

    def ensure_cache_path(self) -> None:
        self._folder.mkdir(exist_ok=True)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._digest

    def get_disambiguator(self) -> str:
        return str(self._line)


class _StoredCode(CompileResultCacheImpl):  # type: ignore[misc]
    """numba's format of machine code on a disk, in the folder that we choose."""

    _locator_classes = (_Locator,)


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of a kernel, which may be read-only, and which several processes may write at once."""

    _impl_class = _StoredCode

    def load_overload(self, signature: Any, target: Any) -> Any:
        code = None
        with contextlib.suppress(OSError):
            code = super().load_overload(signature, target)
        if code is None and not os.environ.get(QUIET):
            _say_once("numeric kernels are compiled for this machine, once; the first use takes up to a minute")
        return code

    def save_overload(self, signature: Any, compiled: Any) -> None:
        # Two processes that save for two types of arguments would write both to one file.
        try:
            with open(Path(self.cache_path).with_name("lock"), "wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                super().save_overload(signature, compiled)
        except OSError as error:
            _say_not_saved(f"{error.filename} ({error.strerror})")


def _say_not_saved(reason: str) -> None:
    _say_once(
        f"compiled kernels cannot be saved, so every start compiles them again: {reason}; "
        "set NUMBA_CACHE_DIR to a folder that can be written"
    )


@functools.cache
def _say_once(line: str) -> None:
    _LOGGER.warning("gaudi-bert: %s", line)


# --- the processor


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return what the processor can do, in the words of /proc/cpuinfo; empty where that is unknown."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def fall_back_to_own_processor(flags: frozenset[str]) -> None:
    """Compile for the machine itself where it lacks instructions of the processor that an image's kernels were built for."""
    if numba.config.CPU_NAME == _IMAGE_PROCESSOR and not flags >= _IMAGE_PROCESSOR_FLAGS:
        for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
            os.environ.pop(name, None)
        numba.config.reload_config()


if numba.config.CPU_NAME == _IMAGE_PROCESSOR:
    fall_back_to_own_processor(processor_flags())
