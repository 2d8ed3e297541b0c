"""How every numeric kernel is compiled: once per machine, vectorised, without the interpreter lock, cached by its sources.

numba's own cache notices a change of the file that defines a kernel, not of the files that the kernel calls or takes
constants from, and reads only folders that it may also write. Here a kernel's machine code is stamped with a digest of its
file, of all files of this package that it imports, directly or not, and of the compiler's version: when the digest changes,
it is compiled again (a digest of the package would compile all kernels again after every edit, which takes minutes).
Kernels are looked for next to their module (where an installation or an image has built them, perhaps read-only), then in
the user's cache folder, then in the temporary folder; a new one is saved in the first of these that can be written. If none
can be, each process compiles for itself and reports it in one line. `NUMBA_CACHE_DIR`, if set, is the only folder. What is
in them is executed, so the last two are used only where they are ours and nobody else may write to them.

An image compiles for a named type of processor, so that its kernels serve every machine (`NUMBA_CPU_NAME=x86-64-v3`); on a
processor that lacks the type's instructions, kernels are compiled for that machine alone.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import llvmlite
import numba
import numpy
from numba import njit
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

from gaudi_bert.common.progress import TERMINAL_LINE_EVERY_SECONDS, human_seconds, passing_line_taken

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).resolve().parents[1]
_IMPORT = re.compile(rf"^\s*(?:from|import)\s+({_PACKAGE.name}(?:\.\w+)*)", re.MULTILINE)
_VERSIONS = f"{numba.__version__} {llvmlite.__version__} {numpy.__version__}"

QUIET = "GAUDI_BERT_QUIET"
"""A variable that, if set, suppresses the compilation notice; so does the level of the logger gaudi_bert."""

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
    """The same for a function that makes no array and returns none: references to arrays are then not counted.

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
    """What the machine code of kernels in `file` depends on: its text, that of all it imports from here, the compiler."""
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
def _shared_folders() -> tuple[Path, ...]:
    """Where kernels may lie besides the folders of their modules."""
    folders = []
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(user_cache):  # a user without a home has none
        folders.append(Path(user_cache, "gaudi-bert", "kernels"))
    with contextlib.suppress(OSError):  # without a writable temporary folder
        folders.append(Path(tempfile.gettempdir(), f"gaudi-bert-kernels-{os.getuid()}"))
    return tuple(folders)


def _is_trusted(folder: Path) -> bool:
    """Whether nobody else can have put machine code into `folder`; there is none where a shared folder does not exist."""
    if folder.parent not in _shared_folders():
        return True
    try:
        status = os.lstat(folder.parent)
    except OSError:
        return False
    others_may_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not others_may_write


def _make_trusted(folder: Path) -> None:
    if folder.parent in _shared_folders():
        folder.parent.mkdir(0o700, parents=True, exist_ok=True)
    if not _is_trusted(folder):
        raise PermissionError(errno.EACCES, "others may write there")
    folder.mkdir(parents=True, exist_ok=True)


class _Locator:
    """The folders and the stamp of a kernel's machine code, under the names by which numba asks for them."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._line = function.__code__.co_firstlineno
        self._py_file = file  # numba names it in a warning
        self._file = Path(file).resolve()
        parent = self._file.parent
        below = f"{parent.name}-{hashlib.sha256(str(parent).encode()).hexdigest()[:16]}"
        if numba.config.CACHE_DIR:
            self.folders = [Path(numba.config.CACHE_DIR, below)]
        else:
            self.folders = [parent / "__pycache__", *(folder / below for folder in _shared_folders())]

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _Locator:
        return cls(function, file)

    def ensure_cache_path(self) -> None:
        """Not needed: `_KernelCache` makes the folders."""

    def get_cache_path(self) -> str:
        return str(self.folders[0])

    def get_source_stamp(self) -> str:
        return source_digest(self._file)

    def get_disambiguator(self) -> str:
        return str(self._line)


class _StoredCode(CompileResultCacheImpl):  # type: ignore[misc]
    """numba's format of machine code on a disk, in the folders that we choose."""

    _locator_classes = (_Locator,)


class _CodeFile(IndexDataCacheFile):  # type: ignore[misc]
    """A kernel's file in one folder, with the types of arguments that it was compiled for."""

    def _load_index(self) -> Any:
        """Empty where a type has been renamed or moved since: numba reads the types before it compares the stamps."""
        try:
            return super()._load_index()
        except (AttributeError, ImportError):
            return {}


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """A kernel's machine code, in the first folder that has it, or that can be written (numba's cache knows one folder)."""

    _impl_class = _StoredCode

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        locator, name = self._impl.locator, self._impl.filename_base
        stamp = locator.get_source_stamp()
        self._files = [(folder, _CodeFile(str(folder), name, stamp)) for folder in locator.folders]

    @property
    def is_stored(self) -> bool:
        """Whether there is machine code, for arguments of whatever types."""
        for cache_file in self._trusted_files():
            with contextlib.suppress(OSError):
                if cache_file._load_index():  # noqa: SLF001 - ours
                    return True
        return False

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The machine code for arguments of these types, or None."""
        for cache_file in self._trusted_files():
            self._cache_file = cache_file
            with contextlib.suppress(OSError):
                code = super().load_overload(signature, target)
                if code is not None:
                    return code
        return None

    def _trusted_files(self) -> list[_CodeFile]:
        return [cache_file for folder, cache_file in self._files if _is_trusted(folder)]

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep the machine code for later processes, if there is a folder for it."""
        refusals = []
        for folder, cache_file in self._files:
            self._cache_file = cache_file
            try:
                _make_trusted(folder)
                super().save_overload(signature, compiled)
            except OSError as error:
                refusals.append(f"{folder} ({error.strerror})")
            else:
                return
        _say_once(
            f"compiled kernels cannot be saved, so every start compiles them again: {', '.join(refusals)}; "
            "set NUMBA_CACHE_DIR to a folder that can be written"
        )


@functools.cache
def _say_once(line: str) -> None:
    sys.stderr.write(f"gaudi-bert: {line}\n")


# --- what is shown while kernels are compiled
#
# Counted are the kernels that were announced, those that have been compiled, and those that the present one calls, directly
# or not, without what is stored already. So the number is exact where a command announces what it calls, too large where it
# then needs less, and grows where nothing is announced. How long the rest takes is estimated by the size of its Python code.

_LEAST_SIZE = 500
"""What a kernel without any code takes, in bytes of Python code."""


def announce_kernels(modules: Iterable[ModuleType]) -> None:
    """Count, before they are called, the kernels that are defined in these modules."""
    if not os.environ.get(QUIET):
        NOTICE.announce(value for module in modules for value in vars(module).values() if _is_kernel(value))


def _is_kernel(value: Any) -> bool:
    return isinstance(getattr(value, "_cache", None), _KernelCache)


def _called(function: Any, kernels: dict[Any, int]) -> int:
    """Add to `kernels` what a compiled function calls; returns the size of its code, with what is inlined."""
    code = function.py_func.__code__
    size = _LEAST_SIZE + len(code.co_code)
    for name in code.co_names:
        value = function.py_func.__globals__.get(name)
        if not isinstance(value, Dispatcher) or value in kernels:
            continue
        if _is_kernel(value):
            kernels[value] = 0  # before those it calls, which may call it
            kernels[value] = _called(value, kernels)
        else:
            size += _called(value, kernels) - _LEAST_SIZE
    return size


class _Notice(event.Listener):  # type: ignore[misc]
    """Shows, after so many seconds of compiling, how many kernels of how many are compiled: on a terminal all the time, in a
    log once.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds_remaining, self._depth, self._is_shown = seconds, 0, False
        self._sizes: dict[Any, int] = {}
        self._compiled: set[Any] = set()
        self._known: set[Any] = set()
        self._seconds, self._since = 0.0, 0.0  # of compiling until the last kernel's end, and when that was
        self._idle = threading.Event()

    def announce(self, kernels: Iterable[Any]) -> None:
        """Count kernels that will be called, and those that they call."""
        for kernel in kernels:
            called: dict[Any, int] = {}
            called[kernel] = _called(kernel, called)
            for each in called.keys() - self._known:
                self._known.add(each)
                if not each.signatures and not each._cache.is_stored:  # noqa: SLF001 - as above
                    self._sizes[each] = called[each]

    def on_start(self, event: Any) -> None:
        """A kernel is being compiled, maybe for one that is being compiled."""
        kernel = event.data["dispatcher"]
        if _is_kernel(kernel):
            self._depth += 1
            if self._depth == 1:
                self.announce([kernel])
                self._sizes.setdefault(kernel, _called(kernel, {}))  # it may be stored, for arguments of other types
                self._since, self._idle = time.monotonic(), threading.Event()
                threading.Thread(target=self._watch, args=(self._idle,), daemon=True).start()

    def on_end(self, event: Any) -> None:
        """It is compiled."""
        kernel = event.data["dispatcher"]
        if _is_kernel(kernel):
            self._depth -= 1
            self._compiled.add(kernel)
            self._seconds += time.monotonic() - self._since
            self._since = time.monotonic()
            if self._depth == 0:
                self._idle.set()

    def line(self) -> str:
        """Kernels that are compiled, and an estimate of the seconds that the rest takes."""
        compiled = self._compiled.copy()
        total = len(self._sizes.keys() | compiled)
        done = sum(self._sizes.get(kernel, 0) for kernel in compiled)
        text = f"compiling {min(len(compiled) + 1, total)} of {total}"
        if not done:
            return text
        remaining = self._seconds * (sum(self._sizes.values()) - done) / done - (time.monotonic() - self._since)
        return f"{text}, {human_seconds(max(remaining, 0.0))} left"

    def _watch(self, idle: threading.Event) -> None:
        if idle.wait(max(self.seconds_remaining - self._seconds, 0.0)) or not _LOGGER.isEnabledFor(logging.WARNING):
            return
        if not sys.stderr.isatty():
            if not self._is_shown:
                self._is_shown = True
                _LOGGER.warning("gaudi-bert: for this machine, once: %s", self.line())
            return
        width = shutil.get_terminal_size().columns - 1
        with passing_line_taken():
            while True:
                sys.stderr.write(f"\r{self.line()[:width]:{width}}")
                sys.stderr.flush()
                if idle.wait(TERMINAL_LINE_EVERY_SECONDS):
                    break
            sys.stderr.write("\r" + " " * width + "\r")


_LOGGER = logging.getLogger(_PACKAGE.name)
NOTICE = _Notice(1.0)
if not os.environ.get(QUIET):
    event.register("numba:compile", NOTICE)


# --- the processor


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
