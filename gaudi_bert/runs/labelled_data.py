"""Reading the files of a fine-tuning run (the rows, the tokenizer and the model), and packing the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import fingerprint_file
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.sections import TASK_NAMES, FineTuneSettings, TaskSettings
from gaudi_bert.model.config import ModelSizes
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.histogram import Histogram, count_lengths
from gaudi_bert.packing.row_lengths import RowLengths, choose_row_lengths, estimate_row_cost
from gaudi_bert.packing.strategies import Packing
from gaudi_bert.rows.reading import SkippedRows
from gaudi_bert.rows.tokenizer import RowTokenizer, open_tokenizer
from gaudi_bert.rows.tokenizing import resolve_long_row_policy
from gaudi_bert.rows.types import QuestionRow
from gaudi_bert.tasks.task import NO_VOCABULARY, Task, check_settings_apply, import_task_class
from gaudi_bert.tasks.task_data import (
    TaskData,
    read_task_labels,
    tokenize_file,
)
from gaudi_bert.tasks.task_models import InitialWeights, has_causal_attention, load_initial_weights, make_mask_vocabulary
from gaudi_bert.training.model_files import SentenceSettings, read_sentence_settings


@dataclass(frozen=True)
class FineTuneFiles:
    """The paths of the files that a fine-tuning run reads.

    Attributes:
        data: The training rows.
        evaluation_data: The rows for evaluations, or None.
        model: The folder of the pretrained model.
        vocabulary: The folder with the tokenizer. None if it is in the folder of the model.
    """

    data: Path
    evaluation_data: Path | None
    model: Path
    vocabulary: Path | None = None


@dataclass(frozen=True)
class LabelledData:
    """The contents of the files of a fine-tuning run: the task, the model, the tokenizer and the rows.

    Attributes:
        task: The task, with its settings and labels.
        start: The initial weights of the run.
        tokenizer: The tokenizer.
        folder: The settings of sentence-transformers in the model's folder, which state how embeddings are computed.
        data: The training rows.
        held_out: The rows for evaluations, or None.
        best_metric: The metric that selects the best checkpoint.
        max_sequence_length: The maximum number of tokens in a sequence.
        row_length_notes: A line for the user about the chosen row lengths. Empty if all rows have the same length.
    """

    task: Task
    start: InitialWeights
    tokenizer: RowTokenizer
    folder: SentenceSettings
    data: TaskData
    held_out: TaskData | None
    best_metric: str
    max_sequence_length: int
    row_length_notes: tuple[str, ...]


def read_labelled_data(
    settings: PipelineSettings, files: FineTuneFiles, reporter: Reporter, *, packs_training_rows: bool
) -> LabelledData:
    """Read the model, the tokenizer and the rows of a fine-tuning run. Tokenize the rows and pack them.

    Args:
        settings: The settings of the pipeline.
        files: The files of the run.
        reporter: Shows messages to the user.
        packs_training_rows: Whether the training rows are packed here. Otherwise, the rows of each update are packed when
            the update is read.

    Raises:
        InputError: The files cannot be read, or the rows, the model and the settings do not fit together.
    """
    section = settings.finetune
    task_settings, folder = _complete_task_settings(settings.task, files.model)
    if task_settings.name is None:
        raise InputError(f"--task (task.name): the task is not set; choose one of {', '.join(TASK_NAMES)}")
    name = task_settings.name
    check_settings_apply(name, settings.task)
    tokenizer_settings = folder.tokenizer_settings if files.vocabulary is None else {}
    tokenizer = open_tokenizer(files.vocabulary or files.model, tokenizer_settings, lower_case=folder.lower_case)
    labels, make_task = read_task_labels(files.data, name, task_settings), import_task_class(name)
    task = make_task(task_settings, labels)
    start = load_initial_weights(files.model, task)
    max_sequence_length = _choose_max_sequence_length(section, folder, start.sizes.positions)
    row_lengths = get_explicit_row_lengths(section)
    for key, length in (
        ("row_lengths", row_lengths[-1] if row_lengths else 0),
        ("max_sequence_length", max_sequence_length),
    ):
        if length > start.sizes.positions:
            raise InputError(
                f"finetune.{key} = {length}: the model has only {start.sizes.positions} positions; set a smaller value"
            )
    tokenizer.check_fits(start.sizes.vocab_size, start.sizes.segments)
    reader = _RowReader(section, task, tokenizer, max_sequence_length, start.sizes, reporter)
    data, notes = reader.read_file(files.data, section.depth, packs_rows=packs_training_rows, is_training_file=True)
    # If some training questions have no answer, the model needs a threshold to predict "no answer". Therefore set a default
    # threshold.
    has_unanswerable = any(isinstance(row, QuestionRow) and row.answers == () for row in data.rows)
    if has_unanswerable and task_settings.null_score_threshold is None:
        task_settings = task_settings.model_copy(update={"null_score_threshold": 0.0})
    masks_words = name == "masked-language-modelling"
    task = make_task(task_settings, labels, make_mask_vocabulary(tokenizer) if masks_words else NO_VOCABULARY)
    held_out = None
    if files.evaluation_data is not None:
        held_out, _ = replace(reader, task=task).read_file(files.evaluation_data, section.evaluation_depth, packs_rows=True)
    if section.best_metric is not None and held_out is None:
        raise InputError("finetune.best_metric: the setting requires evaluation data; pass --evaluation FILE")
    best_metric = section.best_metric or task.best_metric
    if best_metric not in task.metric_names:
        raise InputError(
            f"finetune.best_metric = {best_metric}: {name} does not have this metric; choose one of "
            f"{', '.join(task.metric_names)}"
        )
    return LabelledData(task, start, tokenizer, folder, data, held_out, best_metric, max_sequence_length, notes)


def _complete_task_settings(settings: TaskSettings, model: Path) -> tuple[TaskSettings, SentenceSettings]:
    """Complete the settings of an embedding task with the pooling and the prompts from the model's folder.

    The settings of other tasks are returned unchanged.

    Returns:
        The settings of the task, and the sentence-transformers settings in the folder.

    Raises:
        InputError: The pooling or the prompts of the model are not supported.
    """
    if settings.name != "embedding":
        return settings, SentenceSettings()
    folder = read_sentence_settings(model, settings.pooling) or SentenceSettings(settings.pooling or "mean")
    changes = {
        "pooling": folder.pooling,
        "query_prompt": folder.prompts.get("query") if settings.query_prompt is None else settings.query_prompt,
        "document_prompt": folder.prompts.get("document") if settings.document_prompt is None else settings.document_prompt,
    }
    if (changes["query_prompt"] or changes["document_prompt"]) and not folder.pools_prompt:
        raise InputError(
            f"{model}: the model excludes the tokens of prompts from pooling, which is not supported; set task.query_prompt "
            "and task.document_prompt to '' to train without prompts"
        )
    if has_causal_attention(model) and folder.pooling != "last":
        raise InputError(
            f"{model}: each token attends only to the tokens before it, so {folder.pooling} pooling would miss most of a "
            "text; set task.pooling to last"
        )
    return settings.model_copy(update=changes), folder


def _choose_max_sequence_length(section: FineTuneSettings, folder: SentenceSettings, positions: int) -> int:
    """Return the maximum number of tokens in a sequence. Longer texts are truncated or split.

    If the user set `max_sequence_length`, return this setting. Otherwise, return the largest of the requested row lengths.
    If no row lengths were requested, return the maximum in the model's folder or, if it states none, the default of the
    setting, but not more than `positions`.

    Args:
        section: The settings of the section `finetune`.
        folder: The settings of the model's folder, which may limit the length.
        positions: The number of positions of the model.
    """
    if "max_sequence_length" in section.model_fields_set:
        return section.max_sequence_length
    row_lengths = get_explicit_row_lengths(section)
    return row_lengths[-1] if row_lengths else min(folder.max_sequence_length or section.max_sequence_length, positions)


def get_explicit_row_lengths(section: FineTuneSettings) -> tuple[int, ...]:
    """Return the row lengths that the setting `finetune.row_lengths` lists. If it is not set, or is "auto", return an empty
    tuple.
    """
    return section.row_lengths if isinstance(section.row_lengths, tuple) else ()


class _RowFile(NamedTuple):
    """The rows of a file, and notes for the user about the chosen row lengths."""

    data: TaskData
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _RowReader:
    """Reads, tokenizes and packs files of rows for a task and a model.

    Attributes:
        section: The settings of the section `finetune`.
        task: The task.
        tokenizer: The tokenizer.
        max_sequence_length: The maximum number of tokens in a sequence.
        sizes: The sizes of the model.
        reporter: Shows messages to the user.
    """

    section: FineTuneSettings
    task: Task
    tokenizer: RowTokenizer
    max_sequence_length: int
    sizes: ModelSizes
    reporter: Reporter

    def read_file(self, path: Path, depth: int | str, *, packs_rows: bool, is_training_file: bool = False) -> _RowFile:
        """Read, tokenize and pack the rows of a file. Tell the user how many rows were skipped, truncated or split.

        Args:
            path: The file.
            depth: The maximum number of sequences in a pack, or "max".
            packs_rows: Whether the rows are packed.
            is_training_file: Whether this is the training file, for which a message also states how the file is read.

        Raises:
            InputError: The file cannot be read, or its rows do not fit into rows of the given lengths.
        """
        task, length, skipped = self.task, self.max_sequence_length, SkippedRows()
        sequences, rows = tokenize_file(
            path,
            task.name,
            task.settings,
            self.tokenizer,
            task.labels,
            length,
            self.reporter.say if is_training_file else None,
            skipped,
        )
        if skipped.rows:
            self.reporter.say(str(skipped))
        if sequences.cut_rows:
            is_truncated = resolve_long_row_policy(task.name, task.settings) == "truncate"
            action = f"truncated to {length} tokens" if is_truncated else "split into windows"
            all_rows = f"{len(sequences):,} texts" if task.name == "embedding" else f"{len(rows):,} rows"
            self.reporter.say(f"{path}: {sequences.cut_rows:,} of {all_rows} are too long and were {action}")
        packings: tuple[Packing, ...] = ()
        notes: tuple[str, ...] = ()
        counts = count_lengths(sequences.lengths, length).counts
        if self.section.row_lengths is not None:
            try:
                chosen = choose_row_lengths_and_pack(counts, self.section, self.sizes, depth)
            except InputError as error:
                raise InputError(f"finetune.row_lengths: {path}: {error}") from error
            packings, notes = chosen.packings, (chosen.format_row_cost_comparison(),)
        elif packs_rows:
            packings = (pack_histogram(Histogram(length, counts), self.section.algorithm, depth),)
        return _RowFile(TaskData(path, fingerprint_file(path), rows, sequences, packings), notes)


def choose_row_lengths_and_pack(
    length_counts: IntArray, section: FineTuneSettings, sizes: ModelSizes, depth: int | str
) -> RowLengths:
    """Pack sequences into rows of several lengths, and return one packing per length.

    The lengths are those in `finetune.row_lengths`. If this setting contains no lengths, the lengths of the lowest cost are
    chosen.

    Args:
        length_counts: The number of sequences of length 1, 2, ...
        section: The settings of the section `finetune`.
        sizes: The sizes of the model, from which the cost is estimated.
        depth: The maximum number of sequences in a pack, or "max".
    """
    return choose_row_lengths(
        length_counts,
        partial(estimate_row_cost, hidden_size=sizes.hidden_size),
        row_lengths=get_explicit_row_lengths(section) or None,
        max_row_length=sizes.positions,
        depth=depth,
        algorithm=section.algorithm,
        batch_sequences=section.batch_sequences,
    )
