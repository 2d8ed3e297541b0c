"""Stages predict and embed: rows through a model, a window at a time, to an answer or a vector each, in their order.

Answers are JSON lines. Vectors go to `.npy` (float32 [rows, hidden size]), `.parquet` (a column `embedding`), or JSON lines
(`{"embedding": [...]}`), which is also what standard output gets. For the first two they are plain bytes until all are
written, so a killed run is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast, get_args

import numpy as np

from gaudi_bert.artefacts.store.mirrored_folder import local_copies, mirrored
from gaudi_bert.common.arrays import Float32Array, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import check_model, in_store, open_file, url_of
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TaskSettings, TrainingSettings
from gaudi_bert.engines.choose import choose_engine, load_engine
from gaudi_bert.engines.protocol import Engine
from gaudi_bert.model.config import NO_PACKS, BertConfig
from gaudi_bert.model.heads import Pooling, TaskHead, VectorHead
from gaudi_bert.rows.reading import check_first_row
from gaudi_bert.rows.tokenizer import RowTokenizer, open_tokenizer
from gaudi_bert.rows.tokenizing import check_policy
from gaudi_bert.rows.types import STANDARD_INPUT, Row, Sequences, TextRow
from gaudi_bert.rows.window_plan import PackRunner, WindowPlan, plan_window
from gaudi_bert.tables.packed_parquet import write_vectors
from gaudi_bert.tasks.answers import (
    STANDARD_OUTPUT,
    AnswerStream,
    PredictOptions,
    RowSource,
    StreamResult,
    check_choice,
    open_answers,
    shown_progress,
)
from gaudi_bert.tasks.models.task_models import (
    StartWeights,
    check_finished,
    encoder_weights,
    is_bert,
    open_model,
    read_task_folder,
    start_weights,
)
from gaudi_bert.training.model_files import SentenceFolder, read_sentence_folder, tokenizer_length

_ENDINGS = (".npy", ".parquet", ".jsonl")
_ROWS_AT_ONCE = 8192


def predict(
    model: Path,
    data: str,
    out: str,
    options: PredictOptions,
    changes: Mapping[str, Any],
    *,
    reporter: Reporter,
    overwrite: bool = False,
    store: StoreSettings | None = None,
) -> StreamResult:
    """Answer the rows of a file.

    Args:
        model: a folder that `finetune`, or transformers for one of its `BertFor...`, wrote, with its tokenizer; or its URL
            in an object store.
        data: a file of rows, or its URL, or `-`.
        out: the file of JSON lines, or its URL, or `-` for standard output, which cannot be resumed.
        options: how.
        changes: of the task settings that the model was trained with, by name.
        reporter: where progress goes.
        overwrite: replace the answers of other settings.
        store: how object stores are reached.
    """
    with (
        _local_files(model, data, out, store) as (path, rows_file, answers_file),
        shown_progress("predict", rows_file, answers_file, reporter) as progress,
    ):
        described = read_task_folder(path)
        name = changes.get("name", described.task)
        if name != described.task:
            problem = f"{path} is a model of {described.task}; leave it out, or fine-tune another"
            raise InputError(f"task.name = {name}: {problem}")
        # The columns that the model was trained on are defaults: those that are named here must apply.
        settings = described.settings.with_named(changes)
        _check_groups(options, settings, described.task, out)
        check_first_row(rows_file, described.task, settings)
        engine = _engine_of(path)
        with _with_a_way_on(path):
            start = start_weights(path, described.make_task(), lacks_head=False)
        tokenizer, positions = _tokenizer_of(path, start), start.sizes.positions
        length = options.sequence_length(positions, min(described.max_sequence_length or positions, positions))
        rows = RowSource(rows_file, settings, tokenizer, length, described.task, described.labels)
        chosen: dict[str, Any] = {
            "max_sequence_length": length,
            "precision": options.precision,
            "packed": options.packed,
        }
        chosen |= {} if options.group_by is None else {"group_by": options.group_by}
        signature = rows.signature("predict", chosen, start.identity)
        check_policy(described.task, settings)
        task = described.make_task(settings)
        if isinstance(task.head, VectorHead) or not task.head.keeps_outputs:
            raise InputError(f"{path}: {task.name} has no answers to predict; embed its texts, or fine-tune another task")
        runner = _opened(path, engine, start, task.head, task.width, options, length)

        def lines(outputs: Float32Array, sequences: Sequences, answered: Sequence[Row]) -> list[bytes]:
            answers = task.answers(outputs, sequences, answered)
            if options.group_by is None:
                return list(map(_json_line, answers))
            return list(map(_scored_pair, cast(Sequence[TextRow], answered), answers))

        with open_answers(answers_file, signature, rows, reporter, overwrite=overwrite, task=progress) as answers:
            _answer_windows(rows, runner, answers, lines, lambda why: _json_line({"error": why}))
            answers.finish(None if options.group_by is None else _write_ranked)
        return answers.result()


# --- a model, opened to answer windows of rows


@contextmanager
def _local_files(model: Path, data: str, out: str, store: StoreSettings | None) -> Iterator[tuple[Path, str, str]]:
    """Model, rows and answers as files of this machine, copied from and to object stores."""
    if in_store(data) and in_store(out) and url_of(data) == url_of(out):
        raise InputError(f"{url_of(out)}: is the data itself; give another URL with --out")
    with local_copies((model, data), store) as (weights, rows), mirrored(Path(out).parent, store) as folder:
        answers = str(folder / Path(out).name) if in_store(out) else out
        rows_file = str(rows) if in_store(data) else data
        is_pipe = rows_file == STANDARD_INPUT or answers == STANDARD_OUTPUT
        if not is_pipe and Path(answers).exists() and Path(rows_file).exists() and Path(answers).samefile(rows_file):
            raise InputError(f"{answers}: is the data itself; give another file with --out")
        yield weights or model, rows_file, answers


class LoadedModel(NamedTuple):
    """A model with its weights: how a window is packed for it, by the lengths of its sequences, and what runs the packs."""

    plan: Callable[[IntArray], WindowPlan]
    packs: PackRunner


def _engine_of(path: Path) -> Engine:
    return load_engine(choose_engine("auto", is_bert=is_bert(path), key="--engine").name)


def _tokenizer_of(path: Path, start: StartWeights) -> RowTokenizer:
    tokenizer = open_tokenizer(path)
    tokenizer.check_fits(start.sizes.vocab_size, start.sizes.segments)
    return tokenizer


def _opened(
    path: Path,
    engine: Engine,
    start: StartWeights,
    head: TaskHead | VectorHead,
    width: int,
    options: PredictOptions,
    longest: int,
) -> LoadedModel:
    """The model on a device, for sequences of at most `longest` tokens; a card that compiles gets one shape."""
    with _with_a_way_on(path):
        device = engine.open_device(TrainingSettings(precision=options.precision))
        model, one_shape = open_model(start, head, engine, device), device.kind == "hpu"
    plan = partial(
        plan_window,
        hidden_size=start.sizes.hidden_size,
        packed=options.packed,
        one_length=longest if one_shape else None,
        longest_row=None if isinstance(start.config, BertConfig) else start.sizes.positions,
    )
    per: Literal["sequence", "token"] = "token" if head.per_token else "sequence"
    rest: Literal["smaller", "single", "filled"] = "single" if engine.NAME == "tensorflow" else "smaller"
    return LoadedModel(plan, PackRunner(model, per, width, rest="filled" if one_shape else rest))


@contextmanager
def _with_a_way_on(path: Path) -> Iterator[None]:
    """What packs are not right for can still be run elsewhere, as the refusal states."""
    try:
        yield
    except InputError as error:
        reason = str(error).removesuffix(f"; {NO_PACKS}")
        if reason == str(error):
            raise
        way_on = "transformers or sentence-transformers run it, a text in each row"
        raise InputError(f"{path}: {reason}; {way_on}") from error


def _answer_windows(
    rows: RowSource,
    runner: LoadedModel,
    answers: AnswerStream,
    encode: Callable[[Float32Array, Sequences, Sequence[Row]], list[bytes]],
    encode_problem: Callable[[str], bytes],
) -> None:
    """Answer all rows that have no answer yet.

    `encode` turns the outputs for the sequences of rows into what is written for each row, `encode_problem` what is wrong
    with a row that cannot be read.
    """
    for window in answers.windows():
        good, sequences, problems = rows.tokenized(window)
        plan, encoded = None, []
        if sequences is not None:
            plan = runner.plan(sequences.lengths)
            rows_per_slot = len(window) / plan.slots
            outputs = runner.packs.run(sequences, plan, partial(answers.advance, rows_per_slot))
            encoded = encode(outputs, sequences, good)
        else:
            answers.advance(len(window))
        following = iter(encoded)
        all_rows = (encode_problem(problems[row]) if row in problems else next(following) for row in range(len(window)))
        answers.append(window, b"".join(all_rows), sequences, plan, len(problems))


def _json_line(content: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(content, ensure_ascii=False, allow_nan=False)}\n".encode("utf-8", "backslashreplace")


# --- documents ranked by query


def _check_groups(options: PredictOptions, settings: TaskSettings, task: str, out: str) -> None:
    if options.group_by is not None and settings.on_bad_row == "skip":
        raise InputError("--group-by and --on-bad-row skip exclude each other; leave one out")
    if options.group_by is not None and task != "reranking":
        raise InputError(f"--group-by {options.group_by}: is for a model of reranking, this one is of {task}; leave it out")
    if options.group_by is not None and out == STANDARD_OUTPUT:
        raise InputError(f"--group-by {options.group_by}: all rows come before the first query; give --out a file")


def _scored_pair(row: TextRow, answer: Mapping[str, Any]) -> bytes:
    return _json_line({"query": row.text, "document": row.text_pair, **answer})


def _write_ranked(stored: Path, handle: BinaryIO) -> None:
    """Write one line for each query, in the order of the queries: its documents, the best first."""
    offsets: dict[str, list[tuple[float, int]]] = {}
    with open_file(stored) as scored:
        while line := scored.readline():
            pair = json.loads(line)
            offsets.setdefault(pair["query"], []).append((-pair["score"], scored.tell() - len(line)))
        for query, scores in offsets.items():
            documents = []
            for _, offset in sorted(scores):
                scored.seek(offset)
                pair = json.loads(scored.readline())
                documents.append({"document": pair["document"], "score": pair["score"]})
            handle.write(_json_line({"query": query, "documents": documents}))


# --- vectors


@dataclass(frozen=True)
class EmbedOptions(PredictOptions):
    """How texts become vectors; `max_sequence_length` is None for the folder's own, or the model's.

    Attributes:
        pooling: cls, mean or max; None for the folder's own, or the mean.
        normalize: whether vectors get the length 1; None for what the folder does, or not.
        prompt: what precedes each text; None for the folder's own.
        prompt_name: one of the folder's prompts, by its name.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    prompt: str | None = None
    prompt_name: str | None = None

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompt_name is not None:
            raise InputError("--prompt and --prompt-name exclude each other; leave one out")
        check_choice("pooling", self.pooling, get_args(Pooling))
        super().__post_init__()


def embed(
    model: Path,
    data: str,
    out: str,
    options: EmbedOptions,
    settings: TaskSettings,
    *,
    reporter: Reporter,
    overwrite: bool = False,
    store: StoreSettings | None = None,
) -> StreamResult:
    """Embed the texts of a file.

    Args:
        model: a Hugging Face or sentence-transformers folder with its tokenizer.
        data: a file of rows.
        out: `.npy`, `.parquet` or `.jsonl`, or `-` for JSON lines on standard output.
        options: how.
        settings: names of columns, and what becomes of texts that are too long.
        reporter, overwrite, store: as for `predict`.
    """
    ending = ".jsonl" if out == STANDARD_OUTPUT else Path(out).suffix
    if ending not in _ENDINGS:
        raise InputError(f"{out}: vectors are written as {', '.join(_ENDINGS)}; give it one of these endings")
    with (
        _local_files(model, data, out, store) as (path, rows_file, answers_file),
        shown_progress("embed", rows_file, answers_file, reporter) as progress,
    ):
        check_model(path)
        check_finished(path)
        check_first_row(rows_file, None, settings)
        own = read_sentence_folder(path, options.pooling) or SentenceFolder(options.pooling or "mean")
        prompt = _prompt(path, own, options)
        engine = _engine_of(path)
        with _with_a_way_on(path):
            start = encoder_weights(path)
        tokenizer, positions = _tokenizer_of(path, start), start.sizes.positions
        usual = own.max_sequence_length or tokenizer_length(path if path.is_dir() else path.parent) or positions
        length = options.sequence_length(positions, min(usual, positions))
        rows = RowSource(rows_file, settings, tokenizer, length, lower_case=own.lower_case, prompt=prompt)
        normalize = own.normalize if options.normalize is None else options.normalize
        chosen = {
            "pooling": own.pooling,
            "normalize": normalize,
            "max_sequence_length": length,
            "lower_case": own.lower_case,
            "precision": options.precision,
            "packed": options.packed,
            "ending": ending,
            **({"prompt": prompt} if prompt else {}),
        }
        signature = rows.signature("embed", chosen, start.identity)
        check_policy(None, settings)
        head = VectorHead(own.pooling, normalize)
        runner = _opened(path, engine, start, head, start.sizes.hidden_size, options, length)
        with open_answers(answers_file, signature, rows, reporter, overwrite=overwrite, task=progress) as answers:
            if ending == ".jsonl":
                _answer_windows(rows, runner, answers, _vector_lines, lambda why: _vector_line("error", why))
                answers.finish()
            else:
                no_vector = np.full(start.sizes.hidden_size, np.nan, np.float32).tobytes()  # no text has NaN
                _answer_windows(rows, runner, answers, _vector_bytes, lambda _: no_vector)
                answers.finish(partial(_write_array, ending, start.sizes.hidden_size))
        return answers.result()


def _prompt(path: Path, own: SentenceFolder, options: EmbedOptions) -> str:
    prompt = own.prompt(options.prompt_name) if options.prompt is None else options.prompt
    if prompt and not own.pools_prompt:
        raise InputError(f"{path}: leaves the prompt out of the mean, which cannot be done here; give --prompt '' for none")
    return prompt


def _vector_lines(vectors: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> list[bytes]:
    """One object per line; nine digits tell every float32 from its neighbours."""
    return [_vector_line("embedding", [float(f"{value:.9g}") for value in vector]) for vector in vectors.tolist()]


def _vector_line(name: str, value: Any) -> bytes:
    return f"{json.dumps({name: value})}\n".encode()


def _vector_bytes(vectors: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> list[bytes]:
    return [vector.tobytes() for vector in vectors]


def _write_array(ending: str, hidden_size: int, stored: Path, handle: BinaryIO) -> None:
    """Write plain bytes as an array or a table."""
    vectors = np.memmap(stored, np.float32, "r").reshape(-1, hidden_size)
    if ending == ".parquet":
        write_vectors(handle, vectors)
        return
    header = {"descr": "<f4", "fortran_order": False, "shape": vectors.shape}
    np.lib.format.write_array_header_1_0(handle, header)  # type: ignore[no-untyped-call]
    for first in range(0, len(vectors), _ROWS_AT_ONCE):
        handle.write(vectors[first : first + _ROWS_AT_ONCE].tobytes())
