"""How every numeric kernel is compiled: once per machine, vectorised, without the interpreter lock.

numba keeps the machine code, in a folder that is named by the SHA-256 of the kernel's file, of all files of this package
that it imports, and of the compiler's versions: numba's own check overlooks a callee or a constant that changed in another
file. It is in `NUMBA_CACHE_DIR`, if set, as in images, which compile when they are built; else in the user's cache folder,
else in the temporary folder. A folder into which others may write is refused; without one, each process compiles for itself.

An image compiles for a named type of processor (`NUMBA_CPU_NAME=x86-64-v3`), so that its kernels serve every machine but
those that lack its instructions, which compile for themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import logging
import os
import re
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba
import numpy
from llvmlite import binding
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
# That type of processor, with the carry-less multiplication that images add to it, in LLVM's words.
_IMAGE_FEATURES = ("avx2", "bmi", "bmi2", "f16c", "fma", "movbe", "pclmul", "popcnt", "sse4.2")

_OPTIONS = {
    "nogil": True,
    "boundscheck": False,
    "error_model": "numpy",
    # A maximum may run in vector lanes: no kernel uses infinities or NaN. Sums keep their order and are not fused with
    # products, so that results are the same on every processor.
    "fastmath": {"nnan", "ninf", "nsz"},
    "no_cfunc_wrapper": True,
}


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
    compiled = njit(**_OPTIONS, **options)(function)
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
def _hash_and_imports(file: Path) -> tuple[bytes, frozenset[Path]]:
    """The SHA-256 of a source, and the files of this package that it imports, or the folders of which it does."""
    source = file.read_bytes()
    paths = (_PACKAGE.parent.joinpath(*name.split(".")) for name in _IMPORT.findall(source.decode("utf-8")))
    modules = ((path.with_suffix(".py"), path) for path in paths)
    imported = ([module] if module.is_file() else folder.rglob("*.py") for module, folder in modules)
    return hashlib.sha256(source).digest(), frozenset(itertools.chain.from_iterable(imported))


@functools.cache
def _source_digest(file: Path) -> str:
    """Return the SHA-256 of what the machine code of kernels in `file` depends on.

    A digest of the package would be simpler, and compile all kernels again after every edit, which takes minutes.
    """
    files, waiting = {file}, [file]
    while waiting:
        new = _hash_and_imports(waiting.pop())[1] - files
        files |= new
        waiting += new
    digest = hashlib.sha256(_VERSIONS.encode())
    for path in sorted(files):  # stored code names the module that it is from
        name = path.relative_to(_PACKAGE).as_posix() if path.is_relative_to(_PACKAGE) else path.name
        digest.update(name.encode() + b"\0" + _hash_and_imports(path)[0])
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
        self._line, self._digest = function.__code__.co_firstlineno, _source_digest(Path(file).resolve())
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


if numba.config.CPU_NAME == _IMAGE_PROCESSOR and not all(map(binding.get_host_cpu_features().get, _IMAGE_FEATURES)):
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):  # for this machine, which is older than that processor
        os.environ.pop(name, None)
    numba.config.reload_config()
