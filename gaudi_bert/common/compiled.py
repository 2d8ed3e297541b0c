"""Compile numeric functions (kernels) with numba, store their machine code, and define intrinsics for them.

numba stores machine code in a folder whose name contains a SHA-256 of the kernel's source file, of all files of this package
that it imports, and of the compiler versions. numba's own check would miss a called function or a constant that has changed
in another file. The folder is in `NUMBA_CACHE_DIR` if this variable is set. Our container images set it, and compile the
kernels when they are built. Otherwise, the folder is in the user's cache folder or in the temporary folder. A folder that
other users can write to is not used. With a folder, a machine compiles a kernel only once, and otherwise in every process.

Images compile for a common type of processor (`NUMBA_CPU_NAME=x86-64-v3`), so that their kernels run on almost every
machine. A machine without the instructions of this type compiles its own kernels.
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
from typing import Any, NamedTuple, TypeVar

import llvmlite
import numba
import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.extending import intrinsic as numba_intrinsic

from gaudi_bert.common.arrays import AnyArray

Function = TypeVar("Function", bound=Callable[..., Any])

# If this environment variable is set, no messages about compiling are logged.
QUIET = "GAUDI_BERT_QUIET"

_PACKAGE = Path(__file__).resolve().parents[1]
_LOGGER = logging.getLogger(_PACKAGE.name)
_IMPORT = re.compile(rf"^\s*(?:from|import)\s+({_PACKAGE.name}(?:\.\w+)*)", re.MULTILINE)
_VERSIONS = f"{numba.__version__} {llvmlite.__version__} {np.__version__}"

_IMAGE_PROCESSOR = "x86-64-v3"
# In our container images, kernels are compiled in advance for processors that have all of these features. The names are
# those that LLVM uses.
_IMAGE_FEATURES = ("avx2", "bmi", "bmi2", "f16c", "fma", "movbe", "pclmul", "popcnt", "sse4.2")

_OPTIONS = {
    "nogil": True,
    "boundscheck": False,
    "error_model": "numpy",
    # No kernel uses infinities or NaN, and these flags tell LLVM so, which lets it vectorise maxima. Flags for reordering
    # sums or fusing multiplications with additions are left out. They would make the results differ between processors.
    "fastmath": {"nnan", "ninf", "nsz"},
    "no_cfunc_wrapper": True,
}


def kernel(function: Function) -> Function:
    """Compile a function when it is first called, or load machine code that an earlier process compiled and stored.

    Array indices and integer divisors are not checked, so the caller must make sure that they are valid. In kernels, use
    loops instead of `target[:] = values`, because such an assignment also compiles an error message for unequal shapes,
    which takes seconds. `np.sum`, `np.max` and `np.append` also take longer to compile than loops.
    """
    return _compile(function)


def kernel_without_refcounts(function: Function) -> Function:
    """Compile a function that neither allocates nor returns arrays. Unlike `kernel`, omit reference counting.

    Reference counting would take much of the time of a function that is called for every record or sequence.
    """
    return _compile(function, _nrt=False)


def kernel_without_python_wrapper(function: Function) -> Function:
    """Compile a function like `kernel_without_refcounts`, but without an entry point for Python, so that only kernels can
    call it.

    Compiling the entry point would take long.
    """
    return _compile(function, _nrt=False, no_cpython_wrapper=True)


def _compile(function: Function, **options: Any) -> Function:
    """Compile a function with numba, using the options and the kernel cache of this module.

    The function is not compiled again for constant arguments.
    """
    compiled = njit(**_OPTIONS, **options)(function)
    if not numba.config.DISABLE_JIT:
        if _find_cache_folder() is not None:
            compiled._cache = _SharedKernelCache(function)  # noqa: SLF001 - numba has no other way to choose a cache
        compiled.get_call_template = functools.partial(_resolve_call_ignoring_constants, compiled.get_call_template)
    result: Function = compiled
    return result


def _resolve_call_ignoring_constants(
    resolve: Callable[..., Any], argument_types: tuple[Any, ...], keyword_types: dict[str, Any]
) -> Any:
    """Find the compiled version of a kernel that another kernel calls, ignoring which arguments are constants.

    By default, numba treats a constant argument as a type of its own, and would compile the called kernel again for it.
    """
    without_constants = types.unliteral
    keywords = {name: without_constants(kind) for name, kind in keyword_types.items()}
    return resolve(tuple(map(without_constants, argument_types)), keywords)


def inlined_kernel(function: Function) -> Function:
    """Mark a small function to be inlined in every kernel that calls it."""
    compiled: Function = njit(inline="always")(function)
    return compiled


# --- the cache of machine code


class _SourceFile(NamedTuple):
    """The SHA-256 of a source file, and the files of this package that the source file imports."""

    sha256: bytes
    imported: frozenset[Path]


@functools.cache
def _read_source_file(file: Path) -> _SourceFile:
    """Return the SHA-256 of a source file, and the files of this package that the source file imports.

    If it imports a folder, all files in the folder count as imported.
    """
    source = file.read_bytes()
    paths = (_PACKAGE.parent.joinpath(*name.split(".")) for name in _IMPORT.findall(source.decode("utf-8")))
    modules = ((path.with_suffix(".py"), path) for path in paths)
    imported = ([module] if module.is_file() else folder.rglob("*.py") for module, folder in modules)
    return _SourceFile(hashlib.sha256(source).digest(), frozenset(itertools.chain.from_iterable(imported)))


@functools.cache
def _hash_with_imports(file: Path) -> str:
    """Return a SHA-256 that changes whenever the kernels in a source file must be recompiled.

    The SHA-256 covers the file, all files of this package that it imports directly or indirectly, and the compiler versions.
    A digest of the whole package would be simpler, but then every edit would recompile all kernels, which takes minutes.
    """
    files, waiting = {file}, [file]
    while waiting:
        new = _read_source_file(waiting.pop()).imported - files
        files |= new
        waiting += new
    digest = hashlib.sha256(_VERSIONS.encode())
    for path in sorted(files):  # machine code contains the name of its module
        name = path.relative_to(_PACKAGE).as_posix() if path.is_relative_to(_PACKAGE) else path.name
        digest.update(name.encode() + b"\0" + _read_source_file(path).sha256)
    return digest.hexdigest()


@functools.cache
def _find_cache_folder() -> Path | None:
    """Return the folder for machine code. If there is no folder that only this user can write to, warn and return None."""
    folders, refusals = [], []
    if numba.config.CACHE_DIR:
        folders.append(Path(numba.config.CACHE_DIR, "gaudi-bert"))
    else:
        user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if os.path.isabs(user_cache):  # a user without a home directory has no cache folder
            folders.append(Path(user_cache, "gaudi-bert", "kernels"))
        with contextlib.suppress(OSError):  # there may be no writable temporary folder
            folders.append(Path(tempfile.gettempdir(), f"gaudi-bert-kernels-{os.getuid()}"))
    for folder in folders:
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            status = folder.lstat()
        except OSError as error:
            refusals.append(f"{folder} ({error.strerror})")
            continue
        # Load machine code only from a folder that other users cannot change. In a container image, NUMBA_CACHE_DIR is a
        # folder that belongs to root, so accept root as its owner.
        is_ours = status.st_uid == os.getuid() or (numba.config.CACHE_DIR and status.st_uid == 0)
        if is_ours and stat.S_ISDIR(status.st_mode) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return folder
        refusals.append(f"{folder} (other users can write to it)")
    _warn_kernels_not_cached(", ".join(refusals))
    return None


class _Locator:
    """Tells numba where to store the machine code of a kernel. numba prescribes the names of the methods."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._line, self._digest = function.__code__.co_firstlineno, _hash_with_imports(Path(file).resolve())
        self._py_file = file  # numba names it in a warning
        self._folder = Path(_find_cache_folder() or "", f"{Path(file).stem}-{self._digest}")

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _Locator:
        """Create the locator for a function in a source file."""
        return cls(function, file)

    def ensure_cache_path(self) -> None:
        """Create the folder for the machine code."""
        self._folder.mkdir(exist_ok=True)

    def get_cache_path(self) -> str:
        """Return the folder for the machine code."""
        return str(self._folder)

    def get_source_stamp(self) -> str:
        """Return the digest of the sources. numba uses stored machine code only if this digest is unchanged."""
        return self._digest

    def get_disambiguator(self) -> str:
        """Return the kernel's line number, which distinguishes kernels with the same name in one file."""
        return str(self._line)


class _MachineCodeStore(CompileResultCacheImpl):  # type: ignore[misc]
    """Stores machine code in numba's format, in the folder that `_Locator` returns."""

    _locator_classes = (_Locator,)


class _SharedKernelCache(FunctionCache):  # type: ignore[misc]
    """Loads and saves the machine code of a kernel in a folder that several processes may use at once."""

    _impl_class = _MachineCodeStore

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the stored machine code for these argument types. If there is none, log a message and return None."""
        code = None
        with contextlib.suppress(OSError):
            code = super().load_overload(signature, target)
        if code is None and not os.environ.get(QUIET):
            _warn_once("compiling numeric kernels for this machine; this happens once and takes up to a minute")
        return code

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Save the machine code for these argument types."""
        # Take a lock, because two processes that save the same kernel could otherwise write to the same index file at once.
        try:
            with open(Path(self.cache_path).with_name("lock"), "wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                super().save_overload(signature, compiled)
        except OSError as error:
            _warn_kernels_not_cached(f"{error.filename} ({error.strerror})")


def _warn_kernels_not_cached(reason: str) -> None:
    """Log a warning that compiled kernels cannot be saved, unless the same warning has been logged before."""
    _warn_once(
        f"cannot save compiled kernels, so they are compiled again at every start: {reason}; "
        "set NUMBA_CACHE_DIR to a writable folder"
    )


@functools.cache
def _warn_once(line: str) -> None:
    """Log a warning, unless the same line has been logged before."""
    _LOGGER.warning("gaudi-bert: %s", line)


if numba.config.CPU_NAME == _IMAGE_PROCESSOR and not all(map(binding.get_host_cpu_features().get, _IMAGE_FEATURES)):
    # The kernels in the container image need features that this processor lacks. Therefore remove the variables that the
    # image sets, and compile for this machine.
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        os.environ.pop(name, None)
    numba.config.reload_config()


# --- intrinsics: functions for kernels that read, write and copy bytes at raw memory addresses
#
# The kernels that process records use addresses (int64) into buffers that their callers own, because a single instruction
# can then read eight bytes at any alignment. These functions do not check bounds. Before a kernel calls one of them, it must
# make sure that the bytes are inside the buffer.
#
# In compiled code, `array.ctypes.data` is uint64, and combining uint64 with int64 gives float64. Therefore, kernels take
# arrays and get their addresses only from `address_of`.

_BYTE, _HALF, _INT, _WORD, _DOUBLE_WORD = (ir.IntType(bits) for bits in (8, 16, 32, 64, 128))


# This function converts a variable in a kernel to a signed 64-bit integer. Without this conversion, numba may infer another
# integer type.
as_word: Callable[[Any], int] = np.int64  # type: ignore[assignment]


@inlined_kernel
def address_of(array: AnyArray) -> int:
    """Return the address of the first byte of a contiguous array. Only kernels can call this function.

    The caller of the kernel must keep the array alive.
    """
    return as_word(array.ctypes.data)


def make_intrinsic(result_type: Any, argument_count: int, emit: Callable[..., Any]) -> Any:
    """Create a function for use inside kernels from a Python function that emits its LLVM instructions.

    Args:
        result_type: The numba type of the result.
        argument_count: The number of arguments, from 1 to 3. All of them are int64.
        emit: A function that emits the instructions and returns the result: `emit(context, builder, *arguments)`.
    """
    signature = result_type(*[types.int64] * argument_count)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        result = emit(context, builder, *arguments)
        return context.get_dummy_value() if result_type is types.void else result

    # numba reads the number of arguments of an intrinsic from the signature of its Python function. Therefore define one
    # function for each number of arguments.
    definitions: tuple[Callable[..., Any], ...] = (
        lambda types_, first: (signature, generate),
        lambda types_, first, second: (signature, generate),
        lambda types_, first, second, third: (signature, generate),
    )
    return numba_intrinsic(definitions[argument_count - 1])


def _emit_pointer(builder: Any, address: Any, kind: Any) -> Any:
    """Emit the conversion of an address to an LLVM pointer, and return the pointer."""
    return builder.inttoptr(address, kind.as_pointer())


def _make_load_intrinsic(kind: Any, argument_count: int = 1) -> Any:
    """Create a kernel function that reads one value of an LLVM type at an address of any alignment.

    With two arguments, the second argument of the function is an index in an array that begins at the address. If the
    address is constant in a loop, LLVM can vectorise the loop.
    """

    def load(_: Any, builder: Any, address: Any, *index: Any) -> Any:
        pointer = _emit_pointer(builder, address, kind)
        value = builder.load(builder.gep(pointer, index) if index else pointer)
        value.align = 1
        return value if kind is _WORD else builder.zext(value, _WORD)

    return make_intrinsic(types.int64, argument_count, load)


def _make_store_intrinsic(kind: Any) -> Any:
    """Create a kernel function that writes one value of an LLVM type to an address of any alignment."""

    def store(_: Any, builder: Any, address: Any, value: Any) -> None:
        narrow = value if kind is _WORD else builder.trunc(value, kind)
        builder.store(narrow, _emit_pointer(builder, address, kind)).align = 1

    return make_intrinsic(types.void, 2, store)


byte_at: Callable[[int, int], int] = _make_load_intrinsic(_BYTE, argument_count=2)
word_at: Callable[[int, int], int] = _make_load_intrinsic(_WORD, argument_count=2)
load_u8: Callable[[int], int] = _make_load_intrinsic(_BYTE)
load_u32: Callable[[int], int] = _make_load_intrinsic(_INT)
load_word: Callable[[int], int] = _make_load_intrinsic(_WORD)
store_u8: Callable[[int, int], None] = _make_store_intrinsic(_BYTE)
store_u16: Callable[[int, int], None] = _make_store_intrinsic(_HALF)
store_u32: Callable[[int, int], None] = _make_store_intrinsic(_INT)
store_word: Callable[[int, int], None] = _make_store_intrinsic(_WORD)


def _emit_copy(_: Any, builder: Any, destination: Any, source: Any, count: Any) -> None:
    """Emit a call to memcpy. The source and the destination must not overlap."""
    cgutils.raw_memcpy(builder, _emit_pointer(builder, destination, _BYTE), _emit_pointer(builder, source, _BYTE), count, 1)


def _emit_fill(_: Any, builder: Any, destination: Any, value: Any, count: Any) -> None:
    """Emit a call to memset."""
    cgutils.memset(builder, _emit_pointer(builder, destination, _BYTE), count, builder.trunc(value, _BYTE))


def _emit_prefetch(_: Any, builder: Any, address: Any) -> None:
    """Emit an instruction that prefetches the cache line at an address. The address need not be valid."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [_emit_pointer(builder, address, _BYTE), _INT(0), _INT(3), _INT(1)])


def _emit_wyhash_mix(_: Any, builder: Any, first: Any, second: Any) -> Any:
    """Emit the mixing step of wyhash, which multiplies two 64-bit words and XORs the two halves of the product."""
    product = builder.mul(builder.zext(first, _DOUBLE_WORD), builder.zext(second, _DOUBLE_WORD))
    high = builder.trunc(builder.lshr(product, _DOUBLE_WORD(64)), _WORD)
    return builder.xor(high, builder.trunc(product, _WORD))


copy_bytes: Callable[[int, int, int], None] = make_intrinsic(types.void, 3, _emit_copy)
fill_bytes: Callable[[int, int, int], None] = make_intrinsic(types.void, 3, _emit_fill)
prefetch: Callable[[int], None] = make_intrinsic(types.void, 1, _emit_prefetch)
count_bits: Callable[[int], int] = make_intrinsic(types.int64, 1, lambda _, builder, word: builder.ctpop(word))
multiply_mix: Callable[[int, int], int] = make_intrinsic(types.int64, 2, _emit_wyhash_mix)
# These functions compute modulo 2**64. With numba's own + and - on int64, LLVM assumes that nothing overflows.
add_words: Callable[[int, int], int] = make_intrinsic(types.int64, 2, lambda _, builder, one, other: builder.add(one, other))
subtract_words: Callable[[int, int], int] = make_intrinsic(
    types.int64, 2, lambda _, builder, one, other: builder.sub(one, other)
)
