"""The output files of a section: examples shuffled in a bounded buffer, dealt in turn to the files.

The buffer takes whole blocks until it holds `SHUFFLE_BYTES`; then its examples, in a seeded random order, are dealt one by
one to the files of the section. So the examples of one document lie in several files, and files differ by one at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file
from gaudi_bert.common.permutation import permutation
from gaudi_bert.corpus.blocks import Section
from gaudi_bert.corpus.examples import BlockExamples, ExampleCounts

__all__ = ["SHUFFLE_BYTES", "WrittenPart", "WrittenSection", "part_name", "write_section"]

SHUFFLE_BYTES = 64 << 20


@dataclass(frozen=True)
class WrittenPart:
    """An output file."""

    name: str
    sequences: int
    bytes: int


@dataclass(frozen=True)
class WrittenSection:
    """What became of the text of a section, and its files."""

    counts: ExampleCounts
    files: tuple[WrittenPart, ...]


def part_name(part: int, parts: int) -> str:
    """The name of an output file."""
    return f"part-{part:05d}-of-{parts:05d}.tfrecord"


def write_section(
    section: Section, examples: Iterable[BlockExamples], folder: Path, parts: int, seed: int
) -> WrittenSection:
    """Write the output files of `section` into `folder`; each appears whole or not at all.

    Args:
        section: which blocks and files.
        examples: of its blocks, in their order.
        folder: `train/` or `evaluation/`.
        parts: how many files the whole split has.
        seed: fixes the order.

    Raises:
        InputError: there are fewer examples than files.
        FailedError: a file cannot be written.
    """
    counts = ExampleCounts()
    names = [part_name(part, parts) for part in section.parts]
    dealt = np.zeros((len(names), 2), dtype=np.int64)
    with ExitStack() as stack:
        handles = [stack.enter_context(atomic_file(folder / name)) for name in names]
        buffer: list[BlockExamples] = []
        flushes = 0
        for block in examples:
            counts += block.counts
            buffer.append(block)
            if sum(len(held.frames) for held in buffer) >= SHUFFLE_BYTES:
                _deal(buffer, handles, dealt, seed, section, flushes)
                buffer, flushes = [], flushes + 1
        _deal(buffer, handles, dealt, seed, section, flushes)
        if not dealt[:, 0].all():
            raise InputError(
                f"prepare.shards = {parts}: the text of {section.split} gives only {dealt[:, 0].sum()} examples for "
                f"{len(names)} files; ask for fewer shards, or give more text"
            )
    files = tuple(WrittenPart(name, int(count), int(size)) for name, (count, size) in zip(names, dealt, strict=True))
    return WrittenSection(counts, files)


def _deal(
    buffer: Sequence[BlockExamples],
    handles: Sequence[BinaryIO],
    dealt: NDArray[np.int64],
    seed: int,
    section: Section,
    flush: int,
) -> None:
    """Deal the examples of `buffer`; `dealt` [files, 2] counts the examples and bytes that each file has."""
    if not buffer:
        return
    views = [memoryview(held.frames) for held in buffer]
    starts = np.concatenate([np.cumsum(held.lengths) - held.lengths for held in buffer])
    lengths = np.concatenate([held.lengths for held in buffer])
    holders = np.repeat(np.arange(len(buffer)), [len(held.lengths) for held in buffer])
    order = permutation(len(lengths), seed, f"order of {section.split}", section.number, flush)
    files = (int(dealt[:, 0].sum()) + np.arange(len(order))) % len(handles)
    dealt[:, 0] += np.bincount(files, minlength=len(handles))
    np.add.at(dealt[:, 1], files, lengths[order])
    for values in zip(files.tolist(), holders[order].tolist(), starts[order].tolist(), lengths[order].tolist(), strict=True):
        file, holder, start, length = values
        handles[file].write(views[holder][start : start + length])
