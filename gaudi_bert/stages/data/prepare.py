"""The stage `prepare`: plain text to unpacked pretraining examples, one split for training and one held out.

    out/train/part-00000-of-00008.tfrecord ...   out/evaluation/part-...
    out/vocab.txt                                 given, or trained from the training documents
    out/settings.json                             settings and inputs, written first
    out/examples.json                             what was made, written last

Text is read twice: once to find formats and documents, once to make examples, block by block (`gaudi_bert.corpus.blocks`).
Memory does not grow with the text: this process holds a shuffle buffer (64 MiB), a block for each worker and a few bytes a
document; a worker holds one block of 2 Mi characters and its examples (seen: 0.4 GB for all in one process, 0.3 GB a worker;
`benchmarks/prepare.py`). Every byte is a function of text and settings, whoever does the work: shard K of N makes the
sections K, K + N, ..., and who ends last writes examples.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.artefacts.completion import Signature, settings_path
from gaudi_bert.artefacts.examples import (
    PreparedExamples,
    PreparedFile,
    PreparedSection,
    PreparedVocabulary,
    TextSource,
    read_prepared_examples,
    read_section,
    write_examples,
)
from gaudi_bert.artefacts.names import EXAMPLES_NAME, section_path
from gaudi_bert.artefacts.store.mirror import mirror
from gaudi_bert.artefacts.store.workplace import Workplace, begin_in, workplace
from gaudi_bert.common.built_in_texts import BUILT_IN_TEXTS
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import exclusive_lock, write_json, write_text
from gaudi_bert.common.progress import Reporter, Task
from gaudi_bert.config import PrepareSettings, StoreSettings
from gaudi_bert.stages.results import PreparedShard, PrepareResult

if TYPE_CHECKING:
    from gaudi_bert.corpus.blocks import Block, Section, SourceScan, Split
    from gaudi_bert.corpus.examples import BlockExamples, ExampleSettings
    from gaudi_bert.corpus.sources import Source
    from gaudi_bert.corpus.vocabulary import Vocabulary

__all__ = ["prepare"]

# A vocabulary is trained on about this much of the training text, taken evenly over all of it.
VOCABULARY_CHARACTERS = 256 << 20


@dataclass(frozen=True)
class _Corpus:
    """The scanned text and how it is divided."""

    scans: Sequence[SourceScan]
    held_out: NDArray[np.bool_]
    blocks: dict[Split, list[Block]]
    parts: dict[Split, int]
    sections: list[Section]

    def chosen(self, split: str) -> NDArray[np.bool_]:
        """bool [documents]: those of `split`."""
        return self.held_out if split == "evaluation" else ~self.held_out


def prepare(
    settings: PrepareSettings,
    out: Path,
    *,
    pipeline_folder: Path,
    shard: tuple[int, int] | None = None,
    reporter: Reporter,
    overwrite: bool = False,
    workers: int | None = None,
    store: StoreSettings | None = None,
) -> PrepareResult | PreparedShard:
    """Make the examples.

    Args:
        settings: what to make, and from which text.
        out: the folder that is made.
        pipeline_folder: where relative paths in `settings` start.
        shard: (K, N): make only the sections K, K + N, ...; None makes all.
        reporter: where progress goes.
        overwrite: make again what other settings made.
        workers: processes; by default one a processor.
        store: how object stores are reached, where text, vocabulary or `out` are URLs; text is then copied to scratch first.

    Returns:
        The content of examples.json and whether there was nothing to do; or the sections left to other shards.

    Raises:
        InputError: text or vocabulary is missing or malformed, or `out` was made from other settings.
        FailedError: a file cannot be written, or a worker died.
    """
    if settings.text is None:
        raise InputError(f"prepare.text: no text was given; name files, folders or globs, or {' or '.join(BUILT_IN_TEXTS)}")
    texts = [settings.text] if isinstance(settings.text, str) else list(settings.text)
    with mirror(store, [*texts, settings.vocab]) as copies, workplace(out, store) as place:
        here = [text if text in BUILT_IN_TEXTS else str(copies.fetch(text)) for text in texts]
        vocab = None if settings.vocab is None else str(copies.fetch(settings.vocab))
        local = settings.model_copy(update={"text": tuple(here), "vocab": vocab})
        return _prepare(local, place, pipeline_folder, shard, reporter, overwrite, workers)


def _prepare(
    settings: PrepareSettings,
    place: Workplace,
    pipeline_folder: Path,
    shard: tuple[int, int] | None,
    reporter: Reporter,
    overwrite: bool,
    workers: int | None,
) -> PrepareResult | PreparedShard:
    """Make the examples from text on this machine."""
    from gaudi_bert.corpus.sources import find_sources
    from gaudi_bert.corpus.workers import default_workers

    out = place.folder
    sources = find_sources(list(settings.text or ()), pipeline_folder)
    given = _given_vocabulary(settings, pipeline_folder)
    place.fetch(settings_path(out))
    is_new = not settings_path(out).exists()
    if begin_in(place, out, out / EXAMPLES_NAME, _signature(settings, sources, given), overwrite):
        reporter.say(f"{place.url or out}: already made from this text and these settings, nothing to do")
        return PrepareResult(read_prepared_examples(out), skipped=True)
    workers = workers or default_workers()
    try:
        corpus = _scan(settings, sources, reporter, workers)
        vocabulary = _vocabulary(settings, given, corpus, place, reporter)
    except InputError:
        # Nothing was made yet: settings left behind would only refuse the mended text.
        if is_new:
            place.remove((settings_path(out),))
        raise
    example_settings = _example_settings(settings, vocabulary)
    number, shards = shard or (0, 1)
    if not corpus.sections[number::shards]:
        reporter.say(f"shard {number}/{shards}: nothing to do, the output has only {len(corpus.sections)} sections")
    for section in corpus.sections[number::shards]:
        _make_section(section, corpus, example_settings, place, reporter, workers)
    return _finish(corpus, vocabulary, given is None, place, reporter)


def _given_vocabulary(settings: PrepareSettings, pipeline_folder: Path) -> Vocabulary | None:
    from gaudi_bert.corpus.vocabulary import read_vocabulary

    if settings.vocab is None:
        return None
    return read_vocabulary(pipeline_folder / Path(settings.vocab).expanduser())


def _signature(settings: PrepareSettings, sources: Sequence[Source], given: Vocabulary | None) -> Signature:
    from gaudi_bert.corpus.sources import source_identity

    kept = settings.model_dump(mode="json", exclude={"text", "vocab", "records", "evaluation_records"})
    if given is not None:
        del kept["train_vocab"]
    vocabulary = {"size": len(given), "sha256": given.sha256} if given is not None else None
    return Signature("prepare", kept, {"text": [source_identity(source) for source in sources], "vocabulary": vocabulary})


def _scan(settings: PrepareSettings, sources: Sequence[Source], reporter: Reporter, workers: int) -> _Corpus:
    """Find the documents of all sources, hold some out, and divide the work."""
    from gaudi_bert.corpus.blocks import choose_evaluation, form_blocks, form_sections, scan_source
    from gaudi_bert.corpus.workers import ordered_map

    scans = []
    with reporter.task("reading the text", len(sources), "files") as task:
        for scan in ordered_map(scan_source, sources, min(workers, len(sources))):
            scans.append(scan)
            task.advance()
    formats = Counter(str(scan.text_format) for scan in scans)
    for text_format, count in formats.items():
        reporter.say(f"{count} {'source' if count == 1 else 'sources'}: {text_format}")
    characters = np.concatenate([scan.document_characters for scan in scans])
    held_out = choose_evaluation(len(characters), settings.evaluation_fraction, settings.seed)
    blocks: dict[Split, list[Block]] = {
        "train": form_blocks(characters, ~held_out),
        "evaluation": form_blocks(characters, held_out),
    }
    wanted = {"train": settings.shards, "evaluation": max(1, round(settings.shards * settings.evaluation_fraction))}
    documents = {"train": int((~held_out).sum()), "evaluation": int(held_out.sum())}
    # Every document gives at least one example for each duplicate, so that no file stays empty.
    parts = {split: min(wanted[split], documents[split]) for split in blocks}
    sections = [
        section for split in blocks if blocks[split] for section in form_sections(split, blocks[split], parts[split])
    ]
    reporter.say(f"{documents['train']:,} documents to train on, {documents['evaluation']:,} held out for evaluation")
    return _Corpus(scans, held_out, blocks, parts, sections)


def _vocabulary(
    settings: PrepareSettings, given: Vocabulary | None, corpus: _Corpus, place: Workplace, reporter: Reporter
) -> Vocabulary:
    """The vocabulary, and vocab.txt beside the examples; one trained by an earlier run is kept."""
    from gaudi_bert.corpus.blocks import read_blocks
    from gaudi_bert.corpus.vocabulary import read_vocabulary, train_vocabulary

    path = place.folder / "vocab.txt"
    place.fetch(path)
    vocabulary = given
    if vocabulary is None and path.exists():
        return read_vocabulary(path)
    if vocabulary is None:
        blocks = corpus.blocks["train"]
        every = max(1, round(sum(block.characters for block in blocks) / VOCABULARY_CHARACTERS))

        def documents() -> Iterator[list[str]]:
            for _, held in read_blocks(corpus.scans, corpus.chosen("train"), blocks[::every]):
                yield from held

        vocabulary = train_vocabulary(documents, settings.train_vocab, settings.lower_case)
        reporter.say(f"trained a vocabulary of {len(vocabulary):,} tokens (asked for {settings.train_vocab:,})")
    write_text(path, vocabulary.text)
    place.put(path)
    return vocabulary


def _example_settings(settings: PrepareSettings, vocabulary: Vocabulary) -> ExampleSettings:
    from gaudi_bert.corpus.examples import ExampleSettings

    return ExampleSettings(
        vocabulary=vocabulary,
        lower_case=settings.lower_case,
        max_sequence_length=settings.max_sequence_length,
        max_predictions=settings.max_predictions,
        duplicates=settings.duplicates,
        short_sequence_probability=settings.short_sequence_probability,
        masked_lm_probability=settings.masked_lm_probability,
        whole_word_masking=settings.whole_word_masking,
        seed=settings.seed,
    )


def _make_section(
    section: Section, corpus: _Corpus, settings: ExampleSettings, place: Workplace, reporter: Reporter, workers: int
) -> None:
    """Make the files of `section`, unless an earlier run did; its summary is written last."""
    from gaudi_bert.corpus.parts import write_section

    out = place.folder
    path = section_path(out, section.split, section.number)
    what = f"{section.split} section {section.number}"
    place.fetch(path)
    if path.exists():
        reporter.say(f"{what}: already made")
        return
    characters = sum(block.characters for block in section.blocks)
    with exclusive_lock(path, what), reporter.task(what, characters, "characters") as task:
        examples = _examples(section, corpus, settings, task, workers)
        written = write_section(section, examples, out / section.split, corpus.parts[section.split], settings.seed)
    files = tuple(PreparedFile(**asdict(file)) for file in written.files)
    for file in files:
        place.move(out / section.split / file.name)
    write_json(path, PreparedSection(**asdict(written.counts), files=files).as_json())
    place.put_once(path)


def _examples(
    section: Section, corpus: _Corpus, settings: ExampleSettings, task: Task, workers: int
) -> Iterator[BlockExamples]:
    from gaudi_bert.corpus.blocks import read_blocks
    from gaudi_bert.corpus.examples import BlockJob, make_examples
    from gaudi_bert.corpus.workers import ordered_map

    blocks = read_blocks(corpus.scans, corpus.chosen(section.split), section.blocks)
    jobs = (BlockJob(documents, section.split, block.number, settings) for block, documents in blocks)
    results = ordered_map(make_examples, jobs, min(workers, len(section.blocks)))
    for block, examples in zip(section.blocks, results, strict=True):
        task.advance(block.characters)
        yield examples


def _finish(
    corpus: _Corpus, vocabulary: Vocabulary, trained: bool, place: Workplace, reporter: Reporter
) -> PrepareResult | PreparedShard:
    """Write examples.json when all sections are there."""
    out = place.folder
    paths = {section: section_path(out, section.split, section.number) for section in corpus.sections}
    place.fetch(*(path for path in paths.values() if not path.exists()))
    missing = [section for section, path in paths.items() if not path.exists()]
    if missing:
        reporter.say(f"{place.url or out}: {len(missing)} of {len(corpus.sections)} sections are left to other shards")
        return PreparedShard(tuple(f"{section.split} {section.number}" for section in missing))
    made = {
        split: [read_section(path) for section, path in paths.items() if section.split == split] for split in corpus.blocks
    }
    content = PreparedExamples(
        vocabulary=PreparedVocabulary(size=len(vocabulary), sha256=vocabulary.sha256, trained=trained),
        sources=tuple(
            TextSource(name=scan.source.name, format=str(scan.text_format), documents=len(scan.document_characters))
            for scan in corpus.scans
        ),
        splits={split: _sum_of(sections) for split, sections in made.items() if sections},
    )
    write_examples(out, content)
    place.put(out / EXAMPLES_NAME)
    for split, figures in content.splits.items():
        reporter.say(f"{split}: {figures.sequences:,} sequences, {figures.tokens:,} tokens, {len(figures.files)} files")
    return PrepareResult(content, skipped=False)


def _sum_of(sections: Sequence[PreparedSection]) -> PreparedSection:
    """The figures of a whole split."""
    figures: Counter[str] = Counter()
    for section in sections:
        figures.update(section.model_dump(exclude={"files"}))
    return PreparedSection(**figures, files=tuple(file for section in sections for file in section.files))
