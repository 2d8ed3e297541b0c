"""How every numeric kernel is compiled: once per machine, vectorised, without the interpreter lock, cached by its sources.

numba's own cache notices a change of the file that defines a kernel, not of the files that the kernel calls or takes
constants from, and reads only folders that it may also write. Here a kernel's machine code is stamped with a digest of its
file, of all files of this package that it imports, directly or not, and of the compiler's version: with another digest it
is compiled anew. Kernels are looked for beside their module (where an installation or an image has built them, perhaps
read-only), then in the user's cache folder, then in the temporary folder; a new one goes to the first of these that can be
written. Without any, each process compiles for itself and says so in one line. `NUMBA_CACHE_DIR`, where it is set, is the
only place.

An image compiles for a named type of processor, so that its kernels serve every machine (`NUMBA_CPU_NAME=x86-64-v3`); on a
processor that lacks the type's instructions, kernels are compiled for that machine alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba
import numpy
from numba import njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache

__all__ = ["borrowing_kernel", "fall_back_to_own_processor", "inlined_kernel", "kernel", "processor_flags", "source_digest"]

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).resolve().parents[1]
_IMPORT = re.compile(rf"^\s*(?:from|import)\s+({_PACKAGE.name}(?:\.\w+)*)", re.MULTILINE)
_VERSIONS = f"{numba.__version__} {llvmlite.__version__} {numpy.__version__}"

_IMAGE_PROCESSOR = "x86-64-v3"
# What that type of processor, with the carry-less multiplication that images add to it, is called in /proc/cpuinfo.
_IMAGE_PROCESSOR_FLAGS = frozenset(["avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "pclmulqdq", "popcnt", "sse4_2"])

# A maximum may run in vector lanes: no kernel uses infinities or NaN. Sums keep their order and are not fused with products,
# so that results are the same on every processor.
_FLOAT_RELAXATIONS = frozenset({"nnan", "ninf", "nsz"})


def kernel(function: Function) -> Function:
    """Compile `function` at its first call, or load what an earlier process compiled from the same sources.

    Array indices and integer divisors are not checked; the caller vouches for them.
    """
    return _compiled(function)


def borrowing_kernel(function: Function) -> Function:
    """The same for a function that makes no array and returns none: references to arrays are then not counted.

    Where a function runs for every record or sequence, counting takes longer than much of its work.
    """
    return _compiled(function, _nrt=False)


def _compiled(function: Function, **options: Any) -> Function:
    relaxations = set(_FLOAT_RELAXATIONS)
    compiled = njit(nogil=True, boundscheck=False, error_model="numpy", fastmath=relaxations, **options)(function)
    if not numba.config.DISABLE_JIT:
        compiled._cache = _KernelCache(function)  # noqa: SLF001 - numba has no other way to choose a cache
    result: Function = compiled
    return result


def inlined_kernel(function: Function) -> Function:
    """A small function that becomes part of every kernel that calls it."""
    compiled: Function = njit(inline="always")(function)
    return compiled


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
    """What the machine code of kernels in `file` depends on: its text, that of all it imports from here, the compiler."""
    found, waiting = {file}, [file]
    while waiting:
        new = set(_imported_files(waiting.pop())) - found
        found |= new
        waiting += new
    digest = hashlib.sha256(_VERSIONS.encode())
    for path in sorted(found):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(_source(path)).digest())
    return digest.hexdigest()


def _is_private(folder: Path) -> bool:
    """Whether nobody else can have put machine code there: `folder` is ours, or absent."""
    try:
        return folder.stat().st_uid == os.getuid()
    except OSError:
        return True


@functools.cache
def _shared_places() -> tuple[Path, ...]:
    """Where kernels may lie besides the folders of their modules, in the order in which they are looked for."""
    places = []
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(user_cache):  # a user without a home has none
        places.append(Path(user_cache, "gaudi-bert", "kernels"))
    with contextlib.suppress(OSError):  # no temporary folder can be written
        places.append(Path(tempfile.gettempdir(), f"gaudi-bert-kernels-{os.getuid()}"))
    return tuple(place for place in places if _is_private(place))


def _folders(file: Path) -> list[Path]:
    """Where kernels of the module `file` may lie, in the order in which they are looked for."""
    below = f"{file.parent.name}-{hashlib.sha256(str(file.parent).encode()).hexdigest()[:16]}"
    if numba.config.CACHE_DIR:
        return [Path(numba.config.CACHE_DIR, below)]
    return [file.parent / "__pycache__", *(place / below for place in _shared_places())]


class _Place:
    """Names numba the folder and the stamp of a kernel's machine code (numba calls this a cache locator)."""

    def __init__(self, function: Callable[..., Any], file: Path, folder: Path) -> None:
        self._line = function.__code__.co_firstlineno
        self._file, self._folder = file, folder
        self._py_file = str(file)  # numba names it in a warning

    def from_function(self, _function: Callable[..., Any], _file: str) -> _Place:
        return self

    def ensure_cache_path(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return source_digest(self._file)

    def get_disambiguator(self) -> str:
        return str(self._line)


class _StoredCode(CompileResultCacheImpl):  # type: ignore[misc]
    """numba's format of machine code on a disk, in the place that we choose."""

    def __init__(self, function: Callable[..., Any], place: _Place) -> None:
        self._locator_classes = [place]
        super().__init__(function)


class _FolderCache(FunctionCache):  # type: ignore[misc]
    """One kernel's machine code in one folder."""

    def __init__(self, function: Callable[..., Any], place: _Place) -> None:
        self._impl_class = functools.partial(_StoredCode, place=place)
        super().__init__(function)


class _KernelCache:
    """One kernel's machine code, in the first folder that has it or takes it (numba's interface of a cache)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        file = Path(function.__code__.co_filename).resolve()
        self._folders = [_FolderCache(function, _Place(function, file, folder)) for folder in _folders(file)]

    @property
    def cache_path(self) -> str:
        """The folder where the kernel is looked for first."""
        return str(self._folders[0].cache_path)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The machine code for arguments of these types, or None."""
        for folder in self._folders:
            try:
                found = folder.load_overload(signature, target)
            except OSError:
                continue
            if found is not None:
                return found
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep the machine code for later processes, where there is a place for it."""
        refusals = []
        for folder in self._folders:
            try:
                folder.save_overload(signature, compiled)
            except OSError as error:
                refusals.append(f"{folder.cache_path} ({error.strerror})")
            else:
                return
        _say_once(
            f"compiled kernels cannot be kept, so every start compiles them anew: {', '.join(refusals)}; "
            "set NUMBA_CACHE_DIR to a folder that can be written"
        )

    def flush(self) -> None:
        """Forget the machine code wherever it can be written."""
        for folder in self._folders:
            if os.access(folder.cache_path, os.W_OK):
                folder.flush()

    def enable(self) -> None:
        """Look at the folders (numba calls this when a kernel's recompiling is allowed again)."""
        for folder in self._folders:
            folder.enable()

    def disable(self) -> None:
        """Leave the folders alone."""
        for folder in self._folders:
            folder.disable()


@functools.cache
def _say_once(line: str) -> None:
    sys.stderr.write(f"gaudi-bert: {line}\n")


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the processor can do, in the words of /proc/cpuinfo; empty where that is unknown."""
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
