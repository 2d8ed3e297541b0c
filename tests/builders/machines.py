"""Parts of a machine: a disk that gets full, memory with guarded neighbours, and the tools of Gaudi cards."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of so many bytes; skips where mounting is not allowed."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"NOT TESTED HERE: mounting a small file system needs root ({mounted.stderr.strip().splitlines()[0]})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def make_read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


PAGE = mmap.PAGESIZE
MOST_DATA = 16 * PAGE


class GuardedBuffer:
    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, MOST_DATA + 2 * PAGE)
        whole = np.frombuffer(self._memory, np.uint8)
        self._inside = whole[PAGE : PAGE + MOST_DATA]
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for page in (whole.ctypes.data, whole.ctypes.data + PAGE + MOST_DATA):
            if protect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")

    def of(self, size: int, at_the_end: bool) -> np.ndarray:
        """`size` bytes that touch the page after or the page before."""
        return self._inside[MOST_DATA - size :] if at_the_end else self._inside[:size]


# --- Gaudi: what hl-smi prints, in the layout that it has had from release 1.4 to 1.24


def hl_smi_table(driver: str, *, cards: int = 8, name: str = "HL-225") -> str:
    """The table of a server; later releases name the driver of the network, too."""
    network = f"| Nic Driver Version:                                 {driver}-0123abc          |\n"
    text = f"| HL-SMI Version:                              hl-{driver}-fw-48.0.1.0          |\n"
    text += f"| Driver Version:                                     {driver}-9e8ecf0          |\n"
    text += network if driver >= "1.20" else ""
    text += "| AIP  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |\n"
    for card in range(cards):
        text += f"|   {card}  {name}              N/A  | 0000:{card}3:00.0     N/A |                   0  |\n"
        text += "| N/A   26C   N/A    87W / 600W |    768MiB / 98304MiB |     0%           N/A |\n"
    text += "| Compute Processes:                                               AIP Memory |\n"
    return text + "".join(
        f"|   {card}        N/A   N/A    N/A                                      N/A    |\n" for card in range(cards)
    )
