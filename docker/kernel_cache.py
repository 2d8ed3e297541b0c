"""Where numba finds the compiled kernels of an image; runs when Python starts (`kernel_cache.pth`).

The build compiles the kernels for a named processor type, so that one cache serves every machine. numba reads a cache only
where it may also write, but containers run as any user on a read-only root. So a container that may not write beside the
built kernels gets a copy of them in its temporary folder. On an older processor, kernels are compiled anew, for it alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

BUILT = "NUMBA_CACHE_DIR"
# What the image's processor type (x86-64-v3 with carry-less multiplication) asks for, as /proc/cpuinfo calls it.
NEEDED_FLAGS = frozenset(["avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "pclmulqdq", "popcnt", "sse4_2"])


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the processor can do; empty where that is unknown."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def own_copy(built: Path, temporary: Path) -> Path:
    """A copy of `built` that this user may write to; made once, by whichever process comes first."""
    copy = temporary / f"gaudi-bert-kernels-{os.getuid()}"
    if not copy.exists():
        unfinished = Path(tempfile.mkdtemp(prefix=".kernels-", dir=temporary))
        shutil.copytree(built, unfinished / "kernels", copy_function=shutil.copyfile)
        with contextlib.suppress(OSError):  # where another process was faster
            (unfinished / "kernels").rename(copy)
        shutil.rmtree(unfinished, ignore_errors=True)
    if copy.stat().st_uid != os.getuid():
        raise PermissionError(f"{copy} belongs to somebody else")
    return copy


def choose() -> None:
    """Set numba's variables for this process and those that it starts."""
    built = os.environ.get(BUILT)
    if built is None or not Path(built).is_dir():
        return
    if not processor_flags() >= NEEDED_FLAGS:
        for name in (BUILT, "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
            os.environ.pop(name, None)
    elif not os.access(built, os.W_OK):
        os.environ[BUILT] = str(own_copy(Path(built), Path(tempfile.gettempdir())))


if os.name == "posix":
    choose()
