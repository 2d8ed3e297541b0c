"""How the work of `prepare` is divided: held-out documents, blocks, sections with their output files, worker processes.

A *block* is a run of consecutive documents of one split (`train` or `evaluation`) with about `BLOCK_CHARACTERS` characters
of text, across files. One worker holds it, and a "random next" document is looked for in it, as in one input file of
Google's script. A *section* is a run of blocks whose examples are dealt to the same few output files. Sections need nothing
from each other, so machines share them (`--shard K/N`).

Examples are shuffled in a buffer. It takes complete blocks until it holds `SHUFFLE_BYTES`; then its examples, in a seeded
random order, are dealt one by one to the files of the section. So the examples of one document are spread over several
files, and the sizes of files differ by one example at most.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias, TypeVar

import numpy as np

from gaudi_bert.artefacts.examples import PreparedFile, PreparedSection
from gaudi_bert.common.arrays import BoolArray, IntArray, permutation
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import atomic_file
from gaudi_bert.corpus.documents import Source, TextFormat, detect_format, read_documents
from gaudi_bert.corpus.examples import BlockExamples

BLOCK_CHARACTERS = 2 << 20
_PARTS_OF_SECTION = 4
SHUFFLE_BYTES = 64 << 20

Split: TypeAlias = Literal["train", "evaluation"]

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class SourceScan:
    """A source after one pass over it: its format, and the characters of each document, int64 [documents]."""

    source: Source
    text_format: TextFormat
    document_characters: IntArray


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
    """Read `source` once: its format and the size of each of its documents."""
    text_format = detect_format(source)
    characters = [sum(map(len, document)) for document in read_documents(source, text_format)]
    if not characters:
        raise InputError(f"{source.shown}: holds no text; remove the file or name another (prepare.text)")
    return SourceScan(source, text_format, np.array(characters, np.int64))


def choose_evaluation(documents: int, fraction: float, seed: int) -> BoolArray:
    """bool [documents]: which are held out: `fraction` of them, at least one and not all; none where `fraction` is 0."""
    held_out = np.zeros(documents, dtype=bool)
    if fraction == 0:
        return held_out
    if documents < 2:
        remedy = "separate documents by blank lines, or set it to 0"
        raise InputError(f"prepare.evaluation_fraction = {fraction}: the text is a single document; {remedy}")
    count = min(max(1, round(documents * fraction)), documents - 1)
    held_out[permutation(documents, seed, "evaluation documents")[:count]] = True
    return held_out


def form_blocks(characters: IntArray, chosen: BoolArray) -> list[Block]:
    """The blocks of the `chosen` documents (bool [documents]), each of at least two documents where there are so many."""
    blocks: list[Block] = []
    first, size, count = -1, 0, 0
    numbers = np.flatnonzero(chosen)
    for position, document in enumerate(numbers.tolist()):
        first = document if first < 0 else first
        size += int(characters[document])
        count += 1
        remaining_documents = len(numbers) - position - 1
        if size >= BLOCK_CHARACTERS and count >= 2 and remaining_documents != 1:
            blocks.append(Block(len(blocks), first, document + 1, size))
            first, size, count = -1, 0, 0
    if count:
        blocks.append(Block(len(blocks), first, int(numbers[-1]) + 1, size))
    return blocks


def form_sections(split: Split, blocks: Sequence[Block], parts: int) -> list[Section]:
    """Deal consecutive blocks to sections of about `_PARTS_OF_SECTION` output files, by their share of the characters."""
    count = min(-(-parts // _PARTS_OF_SECTION), len(blocks))
    borders = [section * parts // count for section in range(count + 1)]
    reached = np.cumsum([block.characters for block in blocks])
    goals = reached[-1] * np.array(borders[1:]) / parts
    cuts = np.searchsorted(reached, goals - 0.5, side="left") + 1
    sections = []
    first = 0
    for section in range(count):
        remaining_sections = count - section - 1
        stop = len(blocks)
        if remaining_sections:
            stop = min(max(int(cuts[section]), first + 1), len(blocks) - remaining_sections)
        parts_of_section = range(borders[section], borders[section + 1])
        sections.append(Section(split, section, tuple(blocks[first:stop]), parts_of_section))
        first = stop
    return sections


def read_blocks(
    scans: Sequence[SourceScan], chosen: BoolArray, blocks: Sequence[Block]
) -> Iterator[tuple[Block, list[list[str]]]]:
    """The documents of consecutive `blocks`, reading only the sources that hold some of them."""
    waiting = iter(blocks)
    block = next(waiting, None)
    gathered: list[list[str]] = []
    offset = 0
    for scan in scans:
        numbers = range(offset, offset + len(scan.document_characters))
        offset = numbers.stop
        if block is None:
            return
        if block.first >= offset:
            continue
        documents = read_documents(scan.source, scan.text_format)
        for number in numbers:
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


# --- the output files of a section


def write_section(
    section: Section, examples: Iterable[BlockExamples], folder: Path, parts: int, seed: int
) -> PreparedSection:
    """Write the files of `section` into `folder`, that of its split, which has `parts` files; each appears atomically."""
    counts: Counter[str] = Counter()
    names = [f"part-{part:05d}-of-{parts:05d}.tfrecord" for part in section.parts]
    dealt = np.zeros((len(names), 2), dtype=np.int64)
    with ExitStack() as stack:
        handles = [stack.enter_context(atomic_file(folder / name)) for name in names]
        buffer: list[BlockExamples] = []
        flushes = 0
        for block in examples:
            counts.update(block.counts)
            buffer.append(block)
            if sum(len(held.frames) for held in buffer) >= SHUFFLE_BYTES:
                _deal(buffer, handles, dealt, seed, section, flushes)
                buffer, flushes = [], flushes + 1
        _deal(buffer, handles, dealt, seed, section, flushes)
        examples_dealt = dealt[:, 0].sum()
        if examples_dealt == 0:
            raise InputError(f"prepare.text: the text of {section.split} gives no example; give several sentences of words")
        if not dealt[:, 0].all():
            problem = f"the text of {section.split} gives only {examples_dealt} examples for {len(names)} files"
            raise InputError(f"prepare.shards = {parts}: {problem}; ask for fewer shards, or give more text")
    sizes = zip(names, dealt.tolist(), strict=True)
    files = tuple(PreparedFile(name=name, sequences=count, bytes=size) for name, (count, size) in sizes)
    return PreparedSection(**counts, files=files)


def _deal(
    buffer: Sequence[BlockExamples], handles: Sequence[BinaryIO], dealt: IntArray, seed: int, section: Section, flush: int
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


# --- worker processes


def _start_worker() -> None:
    """Keep one thread of the tokenizer, and end when the parent does, however that ends; Ctrl-C is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`function` of each item, in the order of the items; with one worker, in this process.

    At most `workers` + 1 items and results are held at a time. Processes are spawned, not forked, because the tokenizer
    keeps threads.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker) as pool:
        in_flight: deque[Future[Result]] = deque()
        try:
            for item in items:
                in_flight.append(pool.submit(function, item))
                if len(in_flight) > workers:
                    yield in_flight.popleft().result()
            while in_flight:
                yield in_flight.popleft().result()
        except BrokenProcessPool as error:
            raise FailedError("a worker process died (out of memory?); run again, with fewer --workers") from error
        finally:
            for future in in_flight:
                future.cancel()
