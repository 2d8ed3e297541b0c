"""Whether the memory of this machine holds a group, which `write` reads completely before it packs it.

Groups are formed of complete files, so a single file may be larger than any limit of the settings: it is refused before
it is read, not after an hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gaudi_bert.artefacts.plan import PlannedGroup
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_text
from gaudi_bert.common.progress import count_of, human_bytes

_BYTES_OF_A_TOKEN = 3
"""Its id, mostly two bytes of a varint, and its segment; masked positions and ids beyond 16,383 come on top."""
_BYTES_OF_A_SEQUENCE = 68
"""Its row of the index with an offset, and what it takes to deal it to a pack."""


def group_memory_bytes(group: PlannedGroup) -> int:
    """What a group takes in memory at least, for data as BERT has it."""
    return _BYTES_OF_A_TOKEN * group.tokens + _BYTES_OF_A_SEQUENCE * group.sequences


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that this process may still take: what the machine has available, and what its container may have.

    None where the operating system does not tell.
    """
    limits = []
    for path in (cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes"):
        text = _text(path).strip()
        if text.isdecimal():
            limits.append(int(text))
    for line in _text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    return min(limits, default=None)


def check_group_memory(number: int, group: PlannedGroup, paths: Sequence[Path], available: int | None) -> None:
    """Refuse a group that `available` bytes cannot hold."""
    needed = group_memory_bytes(group)
    if available is None or needed <= available:
        return
    largest = max(paths, key=lambda path: path.stat().st_size if path.exists() else 0)
    remedy = (
        "split the file into several"
        if len(paths) == 1
        else f"lower packing.group_bytes or packing.group_sequences, or split the largest file, {largest.name}"
    )
    raise InputError(
        f"{paths[0] if len(paths) == 1 else largest.parent}: group {number} has {count_of(group.sequences, 'sequence')} in "
        f"{count_of(len(paths), 'file')} and is packed in memory: at least {human_bytes(needed)} are needed, "
        f"{human_bytes(available)} are available; {remedy}, then make the histogram and the plan again"
    )


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""
