"""Documents held out for evaluation, and the blocks in which documents are worked on.

A *block* is a run of consecutive documents of one split (`train` or `evaluation`) with about `BLOCK_CHARACTERS` characters
of text, over the borders of files. It is what a worker holds, and the world in which a "random next" document is looked for,
as one input file is in Google's script. A *section* is a run of blocks whose examples are dealt to the same few output
files. Sections need nothing from each other, so machines share them (`--shard K/N`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.permutation import permutation
from gaudi_bert.corpus.documents import TextFormat, detect_format, read_documents
from gaudi_bert.corpus.sources import Source

__all__ = [
    "BLOCK_CHARACTERS",
    "Block",
    "Section",
    "SourceScan",
    "Split",
    "choose_evaluation",
    "form_blocks",
    "form_sections",
    "read_blocks",
    "scan_source",
]

BLOCK_CHARACTERS = 2 << 20
PARTS_OF_SECTION = 4

Split: TypeAlias = Literal["train", "evaluation"]
Counts: TypeAlias = NDArray[np.int64]
Chosen: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class SourceScan:
    """What one pass over a source found.

    Args:
        source: the source.
        text_format: what it is.
        document_characters: int64 [documents], characters of each document.
    """

    source: Source
    text_format: TextFormat
    document_characters: Counts


@dataclass(frozen=True)
class Block:
    """Documents `first` to `stop` (excluded), by their numbers over all sources, as far as they are of the block's split."""

    number: int
    first: int
    stop: int
    characters: int


@dataclass(frozen=True)
class Section:
    """Consecutive blocks and the output files (by number) that their examples go to."""

    split: Split
    number: int
    blocks: tuple[Block, ...]
    parts: range


def scan_source(source: Source) -> SourceScan:
    """Read `source` once: its format and the size of each of its documents.

    Raises:
        InputError: the source is malformed or holds no text.
    """
    text_format = detect_format(source)
    characters = [sum(map(len, document)) for document in read_documents(source, text_format)]
    if not characters:
        raise InputError(f"{source.shown}: holds no text; remove the file or name another (prepare.text)")
    return SourceScan(source, text_format, np.array(characters, dtype=np.int64))


def choose_evaluation(documents: int, fraction: float, seed: int) -> Chosen:
    """bool [documents]: which are held out: `fraction` of them, at least one and not all; none where `fraction` is 0.

    Raises:
        InputError: there is a single document, so none can be held out.
    """
    held_out = np.zeros(documents, dtype=bool)
    if fraction == 0:
        return held_out
    if documents < 2:
        raise InputError(
            f"prepare.evaluation_fraction = {fraction}: the text is a single document, so none can be held out; "
            "separate documents by blank lines, or set it to 0"
        )
    count = min(max(1, round(documents * fraction)), documents - 1)
    held_out[permutation(documents, seed, "evaluation documents")[:count]] = True
    return held_out


def form_blocks(characters: Counts, chosen: Chosen) -> list[Block]:
    """The blocks of the `chosen` documents (bool [documents]), each of at least two documents where there are so many."""
    blocks: list[Block] = []
    first, size, count = -1, 0, 0
    numbers = np.flatnonzero(chosen)
    for position, document in enumerate(numbers.tolist()):
        first = document if first < 0 else first
        size += int(characters[document])
        count += 1
        documents_left = len(numbers) - position - 1
        if size >= BLOCK_CHARACTERS and count >= 2 and documents_left != 1:
            blocks.append(Block(len(blocks), first, document + 1, size))
            first, size, count = -1, 0, 0
    if count:
        blocks.append(Block(len(blocks), first, int(numbers[-1]) + 1, size))
    return blocks


def form_sections(split: Split, blocks: Sequence[Block], parts: int) -> list[Section]:
    """Deal consecutive blocks to sections of about `PARTS_OF_SECTION` output files, by their share of the characters."""
    count = min(-(-parts // PARTS_OF_SECTION), len(blocks))
    borders = [section * parts // count for section in range(count + 1)]
    reached = np.cumsum([block.characters for block in blocks])
    goals = reached[-1] * np.array(borders[1:]) / parts
    cuts = np.searchsorted(reached, goals - 0.5, side="left") + 1
    sections = []
    first = 0
    for section in range(count):
        others_left = count - section - 1
        stop = len(blocks) if not others_left else min(max(int(cuts[section]), first + 1), len(blocks) - others_left)
        parts_of_section = range(borders[section], borders[section + 1])
        sections.append(Section(split, section, tuple(blocks[first:stop]), parts_of_section))
        first = stop
    return sections


def read_blocks(
    scans: Sequence[SourceScan], chosen: Chosen, blocks: Sequence[Block]
) -> Iterator[tuple[Block, list[list[str]]]]:
    """The documents of consecutive `blocks`, reading only the sources that hold some of them.

    Raises:
        FailedError: a source changed since it was scanned.
    """
    waiting = iter(blocks)
    block = next(waiting, None)
    gathered: list[list[str]] = []
    offset = 0
    for scan in scans:
        documents_here = len(scan.document_characters)
        if block is None:
            return
        if block.first >= offset + documents_here:
            offset += documents_here
            continue
        documents = read_documents(scan.source, scan.text_format)
        for number in range(offset, offset + documents_here):
            document = next(documents, None)
            if document is None:
                raise FailedError(f"{scan.source.shown}: changed while it was read; run the same command again")
            if number < block.first or not chosen[number]:
                continue
            gathered.append(document)
            if number == block.stop - 1:
                yield block, gathered
                gathered = []
                block = next(waiting, None)
                if block is None:
                    return
        offset += documents_here
