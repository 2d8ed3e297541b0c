"""Divide the text of the stage `prepare` into blocks and sections, run worker processes, and write the output files.

A *block* consists of consecutive documents of one split (`train` or `evaluation`), with about `BLOCK_CHARACTERS` characters
of text. It may extend over several files. One worker processes one block. The random second segments of next-sentence pairs
are taken from the same block, as Google's script takes them from the same input file.

A *section* consists of consecutive blocks. Their examples are distributed over the same few output files. Sections do not
depend on each other, so several machines can share them (`--shard K/N`).

Examples are shuffled in a buffer. When the buffer contains `SHUFFLE_BYTES`, its examples are distributed in a seeded random
order over the files of the section, one after another. As a result, the examples of one document are in several files, and
the numbers of examples in the files differ by one at most.
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
from gaudi_bert.corpus.documents import Source, TextFormat, detect_text_format, read_documents
from gaudi_bert.corpus.examples import PretrainingExamples

BLOCK_CHARACTERS = 2 << 20
_MAX_FILES_PER_SECTION = 4
SHUFFLE_BYTES = 64 << 20

Split: TypeAlias = Literal["train", "evaluation"]

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class MeasuredSource:
    """The format of a text source and the sizes of its documents, as found by `measure_documents`.

    Attributes:
        source: The source.
        text_format: The format of its text.
        document_characters: int64 [documents], the number of characters of each document.
    """

    source: Source
    text_format: TextFormat
    document_characters: IntArray


@dataclass(frozen=True)
class Block:
    """Consecutive documents of the training or the evaluation split. A worker process makes the examples of one block at a
    time.

    Attributes:
        number: The number of the block in its split.
        first: The number of the first document. Documents are numbered over all sources.
        stop: One more than the number of the last document. Documents of the other split in between are not in the block.
        characters: The number of characters in the block.
    """

    number: int
    first: int
    stop: int
    characters: int


@dataclass(frozen=True)
class Section:
    """Consecutive blocks of documents from the training or the evaluation split. All of them share the same output files.

    Attributes:
        split: The split of the blocks.
        number: The number of the section in its split.
        blocks: The blocks.
        parts: The numbers of the output files.
    """

    split: Split
    number: int
    blocks: tuple[Block, ...]
    parts: range


def measure_documents(source: Source) -> MeasuredSource:
    """Read a text source completely, and return its format and the number of characters in each document.

    Raises:
        InputError: The source cannot be read or contains no text.
    """
    text_format = detect_text_format(source)
    document_characters = [sum(map(len, document)) for document in read_documents(source, text_format)]
    if not document_characters:
        raise InputError(f"{source.display_name}: the source contains no text; remove it from prepare.text, or replace it")
    return MeasuredSource(source, text_format, np.array(document_characters, np.int64))


def choose_evaluation_documents(document_count: int, fraction: float, seed: int) -> BoolArray:
    """Choose random documents to hold out for evaluation.

    Args:
        document_count: The number of documents.
        fraction: The fraction of documents to hold out. Unless it is 0, at least one document is held out, and at least one
            is not.
        seed: The seed of the random choice.

    Returns:
        bool [documents], True for the documents that are held out.

    Raises:
        InputError: There is only one document, and `fraction` is not 0.
    """
    held_out = np.zeros(document_count, dtype=bool)
    if fraction == 0:
        return held_out
    if document_count < 2:
        problem = "holding out documents requires at least two, but the text is a single document"
        remedy = "separate documents by blank lines, or set prepare.evaluation_fraction to 0"
        raise InputError(f"prepare.evaluation_fraction = {fraction}: {problem}; {remedy}")
    count = min(max(1, round(document_count * fraction)), document_count - 1)
    held_out[permutation(document_count, seed, "evaluation documents")[:count]] = True
    return held_out


def divide_documents_into_blocks(document_characters: IntArray, is_in_split: BoolArray) -> list[Block]:
    """Divide the documents of the training or the evaluation split into blocks of at least `BLOCK_CHARACTERS` characters.
    Only the last block may be smaller.

    Every block has at least two documents, unless the split has only one.

    Args:
        document_characters: int64 [documents], the number of characters of each document.
        is_in_split: bool [documents], True for the documents of the split.
    """
    blocks: list[Block] = []
    first_document, block_characters, block_documents = -1, 0, 0
    numbers = np.flatnonzero(is_in_split)
    for position, document in enumerate(numbers.tolist()):
        first_document = document if first_document < 0 else first_document
        block_characters += int(document_characters[document])
        block_documents += 1
        remaining_documents = len(numbers) - position - 1
        if block_characters >= BLOCK_CHARACTERS and block_documents >= 2 and remaining_documents != 1:
            blocks.append(Block(len(blocks), first_document, document + 1, block_characters))
            first_document, block_characters, block_documents = -1, 0, 0
    if block_documents:
        blocks.append(Block(len(blocks), first_document, int(numbers[-1]) + 1, block_characters))
    return blocks


def divide_blocks_into_sections(split: Split, blocks: Sequence[Block], file_count: int) -> list[Section]:
    """Divide the blocks of a split into sections of consecutive blocks, and the output files of the split among the
    sections.

    A section gets at most `_MAX_FILES_PER_SECTION` files, unless the split has too few blocks to form enough sections. Each
    section gets about the same fraction of the characters as of the files, so that the files have similar sizes.

    Args:
        split: The split.
        blocks: All blocks of the split.
        file_count: The number of output files of the split.
    """
    section_count = min(-(-file_count // _MAX_FILES_PER_SECTION), len(blocks))
    file_borders = [section * file_count // section_count for section in range(section_count + 1)]
    characters_until_block = np.cumsum([block.characters for block in blocks])
    characters_until_section = characters_until_block[-1] * np.array(file_borders[1:]) / file_count
    cuts = np.searchsorted(characters_until_block, characters_until_section - 0.5, side="left") + 1
    sections = []
    first = 0
    for section in range(section_count):
        remaining_sections = section_count - section - 1
        stop = len(blocks)
        if remaining_sections:
            stop = min(max(int(cuts[section]), first + 1), len(blocks) - remaining_sections)
        parts_of_section = range(file_borders[section], file_borders[section + 1])
        sections.append(Section(split, section, tuple(blocks[first:stop]), parts_of_section))
        first = stop
    return sections


def read_blocks(
    sources: Sequence[MeasuredSource], is_in_split: BoolArray, blocks: Sequence[Block]
) -> Iterator[tuple[Block, list[list[str]]]]:
    """Read the documents of the given blocks, and yield each block together with its documents. A document is a list of
    sentences.

    Sources without documents of these blocks are not read.

    Args:
        sources: All sources.
        is_in_split: bool [documents], True for the documents of the split.
        blocks: Blocks of the split in ascending order.

    Raises:
        FailedError: A source was changed since `measure_documents` read it.
    """
    remaining_blocks = iter(blocks)
    block = next(remaining_blocks, None)
    block_documents: list[list[str]] = []
    offset = 0
    for measured in sources:
        numbers = range(offset, offset + len(measured.document_characters))
        offset = numbers.stop
        if block is None:
            return
        if block.first >= offset:
            continue
        documents = read_documents(measured.source, measured.text_format)
        for number in numbers:
            document = next(documents, None)
            if document is None:
                raise FailedError(
                    f"{measured.source.display_name}: the text was changed while it was read; run the same command again"
                )
            if number < block.first or not is_in_split[number]:
                continue
            block_documents.append(document)
            if number == block.stop - 1:
                yield block, block_documents
                block_documents = []
                block = next(remaining_blocks, None)
                if block is None:
                    return


# --- the output files of a section


def write_section(
    section: Section, examples: Iterable[PretrainingExamples], folder: Path, file_count: int, seed: int
) -> PreparedSection:
    """Write the examples of a section, which consists of consecutive blocks of documents, to the output files of the
    section.

    Each file appears complete or not at all.

    Args:
        section: The section.
        examples: The examples of each of its blocks, in order.
        folder: The folder of the split.
        file_count: The number of output files of the split, which is part of the file names.
        seed: The seed of the random order.

    Returns:
        The counts of the section, and the number of sequences and bytes of each file.

    Raises:
        InputError: The text yields no examples, or too few for the number of files.
    """
    counts: Counter[str] = Counter()
    names = [f"part-{part:05d}-of-{file_count:05d}.tfrecord" for part in section.parts]
    written = np.zeros((len(names), 2), dtype=np.int64)
    with ExitStack() as stack:
        handles = [stack.enter_context(atomic_file(folder / name)) for name in names]
        buffer: list[PretrainingExamples] = []
        flush_count = 0
        for block in examples:
            counts.update(block.counts)
            buffer.append(block)
            if sum(len(held.frames) for held in buffer) >= SHUFFLE_BYTES:
                _distribute_examples(buffer, handles, written, seed, section, flush_count)
                buffer, flush_count = [], flush_count + 1
        _distribute_examples(buffer, handles, written, seed, section, flush_count)
        example_count = written[:, 0].sum()
        if example_count == 0:
            raise InputError(
                f"prepare.text: the {section.split} text yields no examples; add text with several sentences per document"
            )
        if not written[:, 0].all():
            problem = f"the {section.split} text yields only {example_count} examples for {len(names)} files"
            raise InputError(f"prepare.shards = {file_count}: {problem}; reduce prepare.shards, or add text")
    sizes = zip(names, written.tolist(), strict=True)
    files = tuple(PreparedFile(name=name, sequences=count, bytes=size) for name, (count, size) in sizes)
    return PreparedSection(**counts, files=files)


def _distribute_examples(
    buffer: Sequence[PretrainingExamples],
    handles: Sequence[BinaryIO],
    written: IntArray,
    seed: int,
    section: Section,
    flush_number: int,
) -> None:
    """Shuffle the buffered examples, and write them to the output files in turn.

    Args:
        buffer: The examples of several blocks.
        handles: The open files.
        written: int64 [files, 2], the number of examples and of bytes in each file. It is updated.
        seed: The seed of the random order.
        section: The section, which is part of the seed.
        flush_number: How often the buffer of this section was emptied before, which is part of the seed.
    """
    if not buffer:
        return
    views = [memoryview(held.frames) for held in buffer]
    starts = np.concatenate([np.cumsum(held.lengths) - held.lengths for held in buffer])
    lengths = np.concatenate([held.lengths for held in buffer])
    holders = np.repeat(np.arange(len(buffer)), [len(held.lengths) for held in buffer])
    order = permutation(len(lengths), seed, f"order of {section.split}", section.number, flush_number)
    files = (int(written[:, 0].sum()) + np.arange(len(order))) % len(handles)
    written[:, 0] += np.bincount(files, minlength=len(handles))
    np.add.at(written[:, 1], files, lengths[order])
    for values in zip(files.tolist(), holders[order].tolist(), starts[order].tolist(), lengths[order].tolist(), strict=True):
        file, holder, start, length = values
        handles[file].write(views[holder][start : start + length])


# --- worker processes


def _set_up_worker_process() -> None:
    """Set up a worker process to use one tokenizer thread, ignore Ctrl-C, and exit when the parent process ends.

    The parent process handles Ctrl-C for all processes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Wait until the parent process ends for any reason, and then end this process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def map_in_processes(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Apply a function to each item in worker processes, and yield the results in the order of the items.

    At most `workers` + 1 items and results are in memory at a time. With one worker, the function runs in this process.

    Args:
        function: The function. It must be importable in another process.
        items: The items.
        workers: The number of processes.

    Raises:
        FailedError: A worker process was killed, for example because the memory was used up.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    # A forked process would not have the threads that the tokenizer has started, so start new processes instead.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _set_up_worker_process) as pool:
        in_flight: deque[Future[Result]] = deque()
        try:
            for item in items:
                in_flight.append(pool.submit(function, item))
                if len(in_flight) > workers:
                    yield in_flight.popleft().result()
            while in_flight:
                yield in_flight.popleft().result()
        except BrokenProcessPool as error:
            raise FailedError(
                "a worker process was killed, perhaps for lack of memory; run the same command with fewer --workers"
            ) from error
        finally:
            for future in in_flight:
                future.cancel()
