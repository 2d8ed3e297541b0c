"""The stage `prepare`, which converts plain text to unpacked pretraining examples for training and for evaluation.

    out/train/part-00000-of-00008.tfrecord ...   out/evaluation/part-...
    out/vocab.txt                                 given by the user, or trained from the training documents
    out/settings.json                             the settings and inputs, written first
    out/examples.json                             the summary, written last

The text is read twice: first to detect formats and count documents, and then to make the examples block by block (see
`gaudi_bert.corpus.blocks`). The memory does not grow with the size of the text (see `benchmarks/prepare.py`). The written
bytes depend only on the text and the settings. Shard K of N writes the sections K, K + N, and so on, and the shard that
finishes last writes examples.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.completion import GroupedOutput, Signature, settings_path
from gaudi_bert.artefacts.examples import PreparedExamples, PreparedSection, PreparedVocabulary, TextSource
from gaudi_bert.artefacts.mirrored_folder import (
    download_missing_files,
    format_path,
    mirror_folder,
    open_local_copies,
    remove_files,
    remove_local_copies,
)
from gaudi_bert.artefacts.results import PlainResult, StageOutput, StageRun
from gaudi_bert.artefacts.work_folder import EXAMPLES_NAME
from gaudi_bert.common.arrays import BoolArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import write_text
from gaudi_bert.common.processor import choose_worker_count
from gaudi_bert.common.progress import Reporter, Task, format_count
from gaudi_bert.config.sections import PrepareSettings
from gaudi_bert.corpus.blocks import (
    Block,
    MeasuredSource,
    Section,
    Split,
    choose_evaluation_documents,
    divide_blocks_into_sections,
    divide_documents_into_blocks,
    map_in_processes,
    measure_documents,
    read_blocks,
    write_section,
)
from gaudi_bert.corpus.documents import Source, compute_source_identity, find_sources
from gaudi_bert.corpus.examples import DocumentBlockJob, PretrainingExamples, make_pretraining_examples
from gaudi_bert.corpus.vocabulary import Vocabulary, read_vocabulary, train_vocabulary

# The vocabulary is trained on a sample of the training text with about this many characters. The sample consists of evenly
# spaced blocks.
_VOCABULARY_CHARACTERS = 256 << 20


@dataclass(frozen=True)
class _Corpus:
    """All text sources, and the division of their documents into splits, blocks and sections.

    Attributes:
        sources: The sources, with their formats and document sizes.
        held_out: bool [documents], True for the documents of the split `evaluation`.
        blocks: The blocks of each split.
        parts: The number of output files of each split.
        sections: The sections of all splits.
    """

    sources: Sequence[MeasuredSource]
    held_out: BoolArray
    blocks: dict[Split, list[Block]]
    parts: dict[Split, int]
    sections: list[Section]

    def compute_split_mask(self, split: Split) -> BoolArray:
        """Return a mask that is True for the documents of the given split, bool [documents]."""
        return self.held_out if split == "evaluation" else ~self.held_out


def prepare_examples(
    settings: PrepareSettings,
    out: Path,
    run: StageRun,
    *,
    pipeline_folder: Path,
) -> StageOutput[PreparedExamples] | PlainResult:
    """Convert text to pretraining examples, and write them to a folder.

    Args:
        settings: The settings of the stage.
        out: The folder for the examples, or its URL.
        run: The options of the run, such as the shard and the number of workers.
        pipeline_folder: The folder that relative paths in `settings` start from.

    Returns:
        The content of examples.json, and whether there was nothing to do. If other shards still have to write sections, a
        list of these sections is returned instead.

    Raises:
        InputError: The text or the vocabulary cannot be read, is not valid or is too short, or the folder contains examples
            that were made with other settings.
        FailedError: A worker process was killed, or the text was changed during the run.
    """
    texts = [settings.text] if isinstance(settings.text, str) else list(settings.text or ())
    with (
        open_local_copies([*texts, settings.vocab], run.store) as (*sources, vocab),
        mirror_folder(out, run.store) as folder,
    ):
        here = {"text": tuple(map(str, sources)), "vocab": None if vocab is None else str(vocab)}
        return _prepare_local_files(settings.model_copy(update=here), folder, run, pipeline_folder)


def _prepare_local_files(
    settings: PrepareSettings, out: Path, run: StageRun, pipeline_folder: Path
) -> StageOutput[PreparedExamples] | PlainResult:
    """Convert local text files to examples in a local folder. For the parameters, see `prepare_examples`."""
    sources = find_sources(list(settings.text or ()), pipeline_folder)
    vocab = settings.vocab
    user_vocabulary = None if vocab is None else read_vocabulary(pipeline_folder / Path(vocab).expanduser())
    download_missing_files(settings_path(out))
    is_new = not settings_path(out).exists()
    output: GroupedOutput[Section, PreparedSection] = GroupedOutput(
        out,
        out / EXAMPLES_NAME,
        _compute_signature(settings, sources, user_vocabulary),
        PreparedSection,
        lambda section: out / "sections" / f"{section.split}-{section.number:05d}.json",
        run.reporter,
    )
    if output.begin_unless_finished(run.overwrite):
        return StageOutput(PreparedExamples.read(out), skipped=True)
    try:
        corpus = _read_and_divide_text(settings, sources, run)
        vocabulary = _prepare_vocabulary(settings, user_vocabulary, corpus, out, run.reporter)
    except InputError:
        # The text is faulty, and no examples have been written yet. Remove settings.json, which describes this text.
        # Otherwise, the next run would reject the corrected text.
        if is_new:
            remove_files(settings_path(out))
        raise
    sections = run.select_items_of_this_run(corpus.sections)
    if run.part is not None and not sections:
        shard, all_sections = "/".join(map(str, run.part)), format_count(len(corpus.sections), "section")
        run.reporter.say(f"shard {shard}: there is nothing to do, because the output has only {all_sections}")
    missing = output.find_missing_groups(sections)
    characters = sum(block.characters for section in missing for block in section.blocks)
    with run.reporter.task("prepare", characters, "characters") as task:
        for section in missing:
            _write_section_files(section, corpus, vocabulary, settings, output, task, run.workers)
    return _write_summary_if_complete(corpus, vocabulary, user_vocabulary is None, output)


def _compute_signature(
    settings: PrepareSettings, sources: Sequence[Source], user_vocabulary: Vocabulary | None
) -> Signature:
    """Return the settings and the identities of all inputs, which are stored in settings.json so that a later run can detect
    changes.
    """
    stored = settings.model_dump(mode="json", exclude={"text", "vocab", "records", "evaluation_records"})
    if user_vocabulary is not None:
        del stored["train_vocab"]
    vocabulary = {"size": len(user_vocabulary), "sha256": user_vocabulary.sha256} if user_vocabulary is not None else None
    return Signature(
        "prepare", stored, {"text": [compute_source_identity(source) for source in sources], "vocabulary": vocabulary}
    )


def _read_and_divide_text(settings: PrepareSettings, sources: Sequence[Source], run: StageRun) -> _Corpus:
    """Read all text sources once, choose the held-out documents, and divide the text into blocks and sections."""
    measured = []
    with run.reporter.task("reading the text", len(sources), "files") as task:
        for source in map_in_processes(measure_documents, sources, choose_worker_count(run.workers, len(sources))):
            measured.append(source)
            task.advance()
    for text_format, count in Counter(str(source.text_format) for source in measured).items():
        run.reporter.say(f"{format_count(count, 'source')}: {text_format}")
    characters = np.concatenate([source.document_characters for source in measured])
    held_out = choose_evaluation_documents(len(characters), settings.evaluation_fraction, settings.seed)
    blocks: dict[Split, list[Block]] = {
        "train": divide_documents_into_blocks(characters, ~held_out),
        "evaluation": divide_documents_into_blocks(characters, held_out),
    }
    requested = {"train": settings.shards, "evaluation": max(1, round(settings.shards * settings.evaluation_fraction))}
    documents = {"train": int((~held_out).sum()), "evaluation": int(held_out.sum())}
    # Almost every document yields at least one example. Therefore use at most as many output files as documents, to avoid
    # empty files.
    parts = {split: min(requested[split], documents[split]) for split in blocks}
    sections = [
        section
        for split in blocks
        if blocks[split]
        for section in divide_blocks_into_sections(split, blocks[split], parts[split])
    ]
    run.reporter.say(
        f"{format_count(documents['train'], 'document')} for training, {documents['evaluation']:,} held out for evaluation"
    )
    return _Corpus(measured, held_out, blocks, parts, sections)


def _prepare_vocabulary(
    settings: PrepareSettings, user_vocabulary: Vocabulary | None, corpus: _Corpus, out: Path, reporter: Reporter
) -> Vocabulary:
    """Read or train the vocabulary, and write it to vocab.txt next to the examples.

    The vocabulary is the one that the user has passed, or the one that an earlier run has trained. If there is neither, a
    new one is trained.
    """
    path = out / "vocab.txt"
    download_missing_files(path)
    vocabulary = user_vocabulary
    if vocabulary is None and path.exists():
        return read_vocabulary(path)
    if vocabulary is None:
        blocks = corpus.blocks["train"]
        every = max(1, round(sum(block.characters for block in blocks) / _VOCABULARY_CHARACTERS))

        def read_sample_documents() -> Iterator[list[str]]:
            """Yield the documents of evenly spaced blocks of the training text."""
            for _, held in read_blocks(corpus.sources, corpus.compute_split_mask("train"), blocks[::every]):
                yield from held

        vocabulary = train_vocabulary(read_sample_documents, settings.train_vocab, settings.lower_case)
        reporter.say(f"trained a vocabulary of {len(vocabulary):,} tokens ({settings.train_vocab:,} were requested)")
    write_text(path, vocabulary.text)
    return vocabulary


def _write_section_files(
    section: Section,
    corpus: _Corpus,
    vocabulary: Vocabulary,
    settings: PrepareSettings,
    output: GroupedOutput[Section, PreparedSection],
    task: Task,
    workers: int | None,
) -> None:
    """Make the examples of a section, write its output files, and finally write its summary.

    Args:
        section: The section.
        corpus: The text and its blocks.
        vocabulary: The vocabulary.
        settings: The settings of the stage.
        output: The output folder.
        task: The progress, which is advanced by the characters of each block.
        workers: The number of worker processes, or None for one per core.
    """
    folder, name = output.folder / section.split, f"{section.split} section {section.number}"
    blocks = read_blocks(corpus.sources, corpus.compute_split_mask(section.split), section.blocks)
    jobs = (DocumentBlockJob(documents, section.split, block.number, vocabulary, settings) for block, documents in blocks)

    def make_and_advance() -> Iterator[PretrainingExamples]:
        """Yield the examples of each block, and advance the progress display."""
        results = map_in_processes(make_pretraining_examples, jobs, choose_worker_count(workers, len(section.blocks)))
        for block, examples in zip(section.blocks, results, strict=True):
            task.advance(block.characters)
            yield examples

    with output.lock_group(section, name):
        written = write_section(section, make_and_advance(), folder, corpus.parts[section.split], settings.seed)
        remove_local_copies(*(folder / file.name for file in written.files))
        written.write(output.summary_path(section))


def _write_summary_if_complete(
    corpus: _Corpus, vocabulary: Vocabulary, is_vocabulary_trained: bool, output: GroupedOutput[Section, PreparedSection]
) -> StageOutput[PreparedExamples] | PlainResult:
    """Write examples.json if all sections are complete, and return its content. Otherwise return the sections that are still
    missing.
    """
    completed = dict(output.read_complete_groups(corpus.sections))
    missing = [section for section in corpus.sections if section not in completed]
    if missing:
        output.reporter.say(
            f"{format_path(output.folder)}: other shards must still write {len(missing)} of {len(corpus.sections)} sections"
        )
        left = f"this part is finished; other parts must still write {format_count(len(missing), 'section')}"
        names = tuple(f"{section.split} {section.number}" for section in missing)
        return PlainResult([left], {"finished": False, "missing_sections": names})
    splits: dict[Split, PreparedSection] = {}
    for split in corpus.blocks:
        done = [summary for section, summary in completed.items() if section.split == split]
        if done:
            totals: Counter[str] = Counter()
            for summary in done:
                totals.update(summary.model_dump(exclude={"files"}))
            splits[split] = PreparedSection(**totals, files=tuple(file for summary in done for file in summary.files))
    content = PreparedExamples(
        vocabulary=PreparedVocabulary(size=len(vocabulary), sha256=vocabulary.sha256, trained=is_vocabulary_trained),
        sources=tuple(
            TextSource(name=each.source.name, format=str(each.text_format), documents=len(each.document_characters))
            for each in corpus.sources
        ),
        splits=splits,
    )
    content.write(output.final)
    for split, figures in content.splits.items():
        output.reporter.say(
            f"{split}: {format_count(figures.sequences, 'sequence')}, {format_count(figures.tokens, 'token')}, "
            f"{format_count(len(figures.files), 'file')}"
        )
    return StageOutput(content)
