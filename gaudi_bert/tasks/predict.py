"""The stages `predict` and `embed`, which run a model on the rows of a file and write a prediction or an embedding for each
row. The rows are processed in windows of a few thousand.

Predictions are JSON lines, in the order of the rows. Embeddings are written as `.npy` (float32 [rows, hidden size]), as
`.parquet` (with a column `embedding`), or as JSON lines (`{"embedding": [...]}`), which is also the format on standard
output. For `.npy` and `.parquet`, the embeddings are collected as plain bytes and converted at the end, so that a killed run
can be resumed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast, get_args

import numpy as np

from gaudi_bert.artefacts.mirrored_folder import mirror_folder, open_local_copies
from gaudi_bert.common.arrays import BatchArrays, Float32Array, IntArray
from gaudi_bert.common.arrow import require_pyarrow
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import get_store_url, is_in_store, open_file
from gaudi_bert.common.processor import read_processor
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.options import check_option_combination
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TaskSettings, TrainingSettings
from gaudi_bert.config.values import InferencePrecision, Precision
from gaudi_bert.engines import choose_engine, load_engine
from gaudi_bert.engines.protocol import ComputeDtype, Device, Engine, Model, ModelSpec
from gaudi_bert.model.config import NO_PACKS_REMEDY, BertConfig, EncoderConfig
from gaudi_bert.model.heads import Pooling, TaskHead, VectorHead
from gaudi_bert.rows.packs import IncompleteBatch
from gaudi_bert.rows.reading import check_first_row
from gaudi_bert.rows.tokenizer import RowTokenizer, open_tokenizer
from gaudi_bert.rows.tokenizing import check_long_row_policy
from gaudi_bert.rows.types import STANDARD_INPUT, Row, Sequences, TextRow
from gaudi_bert.rows.window_plan import PackRunner, WindowPlan, plan_window
from gaudi_bert.tasks.prediction_files import (
    STANDARD_OUTPUT,
    PredictionStream,
    PredictOptions,
    RowSource,
    StreamResult,
    check_choice,
    open_prediction_output,
    show_progress,
)
from gaudi_bert.tasks.task import Task, check_settings_apply
from gaudi_bert.tasks.task_models import (
    TaskDescription,
    check_run_is_finished,
    is_bert,
    load_initial_weights,
    read_task_description,
)
from gaudi_bert.training.model_files import SentenceSettings, read_sentence_settings, read_tokenizer_max_length

if TYPE_CHECKING:  # importing this module loads torch
    from gaudi_bert.engines.pytorch.encoder_model import TorchEncoder
    from gaudi_bert.engines.pytorch.model import TorchModel

_EXTENSIONS = (".npy", ".parquet", ".jsonl")
_ROWS_PER_ROW_GROUP = 8192


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
    """Compute a prediction for each row of a file, and write the predictions to a file or to standard output.

    Args:
        model: A folder with its tokenizer, written by `finetune` or by transformers for one of its `BertFor...` classes, or
            its URL in an object store.
        data: A file of rows, or its URL, or `-` for standard input.
        out: The file of JSON lines, or its URL, or `-` for standard output, which cannot be resumed.
        options: The options.
        changes: Task settings by name, which replace those that the model was trained with.
        reporter: Reports messages and progress.
        overwrite: Whether predictions of other settings are replaced.
        store: Settings of the object store.

    Returns:
        The numbers of rows and tokens, and the fraction of padding.

    Raises:
        InputError: The model, an option or a row is invalid, or `out` contains something else.
    """
    with (
        _copy_files_locally(model, data, out, store) as (path, rows_file, answers_file),
        show_progress("predict", rows_file, answers_file, reporter) as progress,
    ):
        described = read_task_description(path)
        if changes.get("name", described.task) != described.task:
            raise InputError(
                f"task.name = {changes['name']}: {path} was fine-tuned for {described.task}; remove the "
                "setting, or fine-tune another model"
            )
        # The settings that are stored with the model may include some that do not apply to its task. So check only the
        # settings that the user passed.
        settings = described.settings.copy_with_user_settings(changes)
        check_settings_apply(described.task, settings)
        check_long_row_policy(described.task, settings)
        if options.group_by is not None:
            check_option_combination(
                {
                    "--group-by": options.group_by,
                    "--on-bad-row skip": settings.on_bad_row == "skip",
                    "--out -": out == STANDARD_OUTPUT,
                }
            )
            if described.task != "reranking":
                raise InputError(
                    f"--group-by {options.group_by}: the option applies only to reranking, not to {described.task}; remove "
                    "the option"
                )
        check_first_row(rows_file, described.task, settings)
        task = described.make_task(settings)
        loaded = load_task_model(described, task, options)
        for note in loaded.notes:
            reporter.say(note)
        length = loaded.max_sequence_length
        prompt = described.texts.find_prompt(None)
        rows = RowSource(rows_file, settings, loaded.tokenizer, length, described.task, described.labels, prompt=prompt)
        chosen = {
            "max_sequence_length": length,
            "precision": loaded.precision,
            "packed": options.packed,
            **({} if options.group_by is None else {"group_by": options.group_by, "ranked_by": "logit"}),
            **({"prompt": prompt} if prompt else {}),
            **({"activation": task.activation} if task.activation != "Sigmoid" else {}),
        }

        def lines(outputs: Float32Array, sequences: Sequences, answered: Sequence[Row]) -> list[bytes]:
            """Return predictions as JSON lines. Lines of ranked documents also contain the query and the logit."""
            answers = task.make_predictions(outputs, sequences, answered)
            if options.group_by is None:
                return list(map(_encode_json_line, answers))
            pairs = zip(cast(Sequence[TextRow], answered), outputs[:, 0].tolist(), answers, strict=True)
            return [
                _encode_json_line({"query": row.text, "document": row.text_pair, "logit": logit, **answer})
                for row, logit, answer in pairs
            ]

        signature = rows.make_signature("predict", chosen, loaded.identity)
        with open_prediction_output(answers_file, signature, rows, reporter, overwrite=overwrite, task=progress) as output:
            convert = None if options.group_by is None else _write_ranked_documents
            return _write_predictions(rows, loaded, output, lines, lambda why: _encode_json_line({"error": why}), convert)


@contextmanager
def _copy_files_locally(
    model: Path, data: str, out: str, store: StoreSettings | None = None
) -> Iterator[tuple[Path, str, str]]:
    """Yield local paths of the model, the rows and the output. Inputs in an object store are downloaded first, and an output
    in a store is uploaded at the end.

    Raises:
        InputError: The predictions would overwrite the rows.
    """
    if is_in_store(data) and is_in_store(out) and get_store_url(data) == get_store_url(out):
        raise InputError(f"{get_store_url(out)}: the URL is also the input; pass another URL to --out")
    with open_local_copies((model, data), store) as (weights, rows), mirror_folder(Path(out).parent, store) as folder:
        answers = str(folder / Path(out).name) if is_in_store(out) else out
        rows_file = str(rows) if is_in_store(data) else data
        is_pipe = rows_file == STANDARD_INPUT or answers == STANDARD_OUTPUT
        if not is_pipe and Path(answers).exists() and Path(rows_file).exists() and Path(answers).samefile(rows_file):
            raise InputError(f"{answers}: the file is also the input; pass another file to --out")
        yield weights or model, rows_file, answers


# --- a model that is loaded once and then run on any number of windows


@dataclass(frozen=True)
class LoadedModel:
    """A model that is loaded on a device, together with its tokenizer.

    Attributes:
        path: The folder or file of the weights.
        tokenizer: The tokenizer.
        max_sequence_length: The largest number of tokens in a sequence.
        positions: The largest number of tokens in a row.
        identity: Identifies the weights.
        plan: Packs sequences, given their lengths as int64 [N].
        runner: Runs the packs of a plan.
        model: Runs one batch.
        precision: The precision of matrix products.
        notes: Lines for the user about the device.
    """

    path: Path
    tokenizer: RowTokenizer
    max_sequence_length: int
    positions: int
    identity: str
    plan: Callable[[IntArray], WindowPlan]
    runner: PackRunner
    model: Model
    precision: InferencePrecision
    notes: tuple[str, ...]


def load_task_model(described: TaskDescription, task: Task, options: PredictOptions) -> LoadedModel:
    """Load a fine-tuned model on a device. `Task.make_predictions` converts the outputs of the model to predictions.

    Args:
        described: The description of the model.
        task: The task, with its head.
        options: The options, such as the device.

    Raises:
        InputError: The task has no predictions, or the model cannot be loaded.
    """
    path = described.path
    if isinstance(task.head, VectorHead) or not task.head.metrics_need_outputs:
        raise InputError(
            f"{path}: models for {task.name} make no predictions; run `gaudi-bert embed`, or fine-tune another task"
        )
    return _load_model(path, task, task.head, options, described.texts, described.max_sequence_length)


def load_encoder(
    path: Path, sentence_settings: SentenceSettings, options: PredictOptions, *, normalize: bool
) -> LoadedModel:
    """Load an encoder on a device. The loaded model returns embeddings.

    Args:
        path: The folder or file of the weights.
        sentence_settings: The settings of the model folder, including the pooling.
        options: The options.
        normalize: Whether embeddings are scaled to norm 1.

    Raises:
        InputError: The model cannot be loaded.
    """
    usual = sentence_settings.max_sequence_length or read_tokenizer_max_length(path if path.is_dir() else path.parent)
    return _load_model(path, None, VectorHead(sentence_settings.pooling, normalize), options, sentence_settings, usual)


def _load_model(
    path: Path,
    task: Task | None,
    head: TaskHead | VectorHead,
    options: PredictOptions,
    sentence_settings: SentenceSettings,
    default_length: int | None,
) -> LoadedModel:
    """Load an encoder with the given head, and the tokenizer that is stored with its weights.

    On a Gaudi card, which compiles each shape, all batches have the same shape.
    """
    with _suggest_transformers_on_error(path):
        start = load_initial_weights(path, task, allow_missing_head=False)
    # On a CPU, PyTorch takes less time than TensorFlow, because it stores the weights in the layout of matrix products.
    chosen = choose_engine(options.engine, is_bert=is_bert(path), setting_name="--engine", preferred="pytorch")
    engine = load_engine(chosen.name)
    tokenizer = open_tokenizer(path, sentence_settings.tokenizer_settings, lower_case=sentence_settings.lower_case)
    positions = start.sizes.positions
    tokenizer.check_fits(start.sizes.vocab_size, start.sizes.segments)
    requested = options.max_sequence_length
    if requested is not None and not 3 <= requested <= positions:
        raise InputError(
            f"--max-sequence-length {requested}: must be between 3 and {positions}, the number of positions of the model"
        )
    longest = requested or min(default_length or positions, positions)
    with _suggest_transformers_on_error(path):
        device, precision, notes = _open_device(engine, options)
        compiled = device.compiles if options.compile is None else options.compile
        model = engine.build_model(ModelSpec(start.config, head), device, seed=None, compiled=compiled)
        model.load_variables(start.variables)
        if isinstance(start.config, EncoderConfig):
            cast("TorchEncoder", model).check_packed_equals_single()
        model.freeze()
    one_shape, width = device.kind == "hpu", start.sizes.hidden_size if task is None else task.output_width
    plan = partial(
        plan_window,
        hidden_size=start.sizes.hidden_size,
        packed=options.packed,
        fixed_row_length=longest if one_shape else None,
        max_row_length=None if isinstance(start.config, BertConfig) else positions,
    )
    incomplete: IncompleteBatch = "filled" if one_shape else "single" if engine.NAME == "tensorflow" else "smaller"
    runner = PackRunner(model.compute_outputs, head.predicts_per_token, width, incomplete=incomplete)
    if engine.NAME == "pytorch" and cast("TorchModel", model).computes_batches_in_parallel:
        from gaudi_bert.engines.pytorch.parallel import map_batches_in_parallel  # imported here, because it loads torch

        runner = replace(runner, map_batches=map_batches_in_parallel)
    return LoadedModel(path, tokenizer, longest, positions, start.identity, plan, runner, model, precision, notes)


def _open_device(engine: Engine, options: PredictOptions) -> tuple[Device, InferencePrecision, tuple[str, ...]]:
    """Open the requested device, and choose the precision of the computation.

    Returns:
        The device, the precision that is used, and lines for the user. If bfloat16 is requested on a CPU without bfloat16
        instructions, the precision is float32.
    """
    precision: Precision = "float32" if options.precision == "float32" else "bfloat16"
    device = engine.open_device(TrainingSettings(precision=precision, device=options.device))
    processor = read_processor()
    if options.precision != "bfloat16" or device.kind != "cpu" or processor.multiplies_bfloat16:
        return device, precision, device.notes
    note = (
        f"note: this processor ({processor.instructions}) does not multiply in bfloat16, so float32 is used; "
        "to compute in bfloat16 anyway, pass --precision bfloat16-always"
    )
    return replace(device, compute_dtype="float32"), "float32", (*device.notes, note)


@contextmanager
def _suggest_transformers_on_error(path: Path) -> Iterator[None]:
    """If a model is rejected because it cannot process packs, mention in the error which other programs can run it."""
    try:
        yield
    except InputError as error:
        reason = str(error).removesuffix(f"; {NO_PACKS_REMEDY}")
        if reason == str(error):
            raise
        raise InputError(
            f"{path}: {reason}; run it with transformers or sentence-transformers, with one text per row"
        ) from error


def _write_predictions(
    rows: RowSource,
    loaded: LoadedModel,
    output: PredictionStream,
    encode: Callable[[Float32Array, Sequences, Sequence[Row]], list[bytes]],
    encode_problem: Callable[[str], bytes],
    convert: Callable[[Path, BinaryIO], None] | None,
) -> StreamResult:
    """Compute and write the predictions of all rows that have no prediction yet, one window of consecutive rows at a time.
    Then complete the output, and return the numbers of rows and tokens.

    Args:
        rows: The rows.
        loaded: The model.
        output: The destination of the predictions.
        encode: Turns the outputs for the sequences of some rows into the bytes to write for each row.
        encode_problem: Returns the bytes to write for a row that cannot be read, given its problem.
        convert: `convert(partial, handle)` writes the final file from the partial file. None if the partial file is the
            final file.

    Raises:
        InputError: An output is not finite.
    """
    for window in output.read_remaining_windows():
        good, sequences, problems = rows.tokenize_window(window)
        plan, encoded = None, []
        if sequences is not None:
            plan = loaded.plan(sequences.lengths)
            rows_per_slot = len(window) / plan.slots
            outputs = loaded.runner.run(sequences, plan, partial(output.advance_progress_bar, rows_per_slot))
            bad = loaded.runner.find_non_finite_row(outputs, sequences)
            if bad is not None:
                raise InputError(
                    f"{loaded.path}: the outputs for {good[bad].position} are not finite, because the weights are damaged "
                    "or too large; train the model again with a lower learning rate, or pass an earlier checkpoint"
                )
            encoded = encode(outputs, sequences, good)
        else:
            output.advance_progress_bar(len(window))
        following = iter(encoded)
        all_rows = (encode_problem(problems[row]) if row in problems else next(following) for row in range(len(window)))
        output.write_window(window, b"".join(all_rows), sequences, plan, len(problems))
    output.finish(convert)
    return output.make_result()


def _encode_json_line(content: Mapping[str, Any]) -> bytes:
    """Encode a JSON object as one line of UTF-8, and escape lone surrogates."""
    return f"{json.dumps(content, ensure_ascii=False, allow_nan=False)}\n".encode("utf-8", "backslashreplace")


def _write_ranked_documents(stored: Path, handle: BinaryIO) -> None:
    """Read the predictions of query-document pairs, and write one JSON line per query with its documents, best first.

    The queries are in order of first appearance.

    Documents are ranked by their logits, because different logits may have scores that round to the same number. Documents
    with equal logits stay in the order of their rows.
    """
    offsets: dict[str, list[tuple[float, int]]] = {}
    with open_file(stored) as scored:
        while line := scored.readline():
            pair = json.loads(line)
            offsets.setdefault(pair["query"], []).append((-pair["logit"], scored.tell() - len(line)))
        for query, logits in offsets.items():
            documents = []
            for _, offset in sorted(logits):
                scored.seek(offset)
                pair = json.loads(scored.readline())
                documents.append({"document": pair["document"], "score": pair["score"]})
            handle.write(_encode_json_line({"query": query, "documents": documents}))


# --- embeddings


@dataclass(frozen=True)
class EmbedOptions(PredictOptions):
    """The options of the command `embed`. If an option is None, the setting in the model folder is used.

    If the folder does not specify it either, the length is that of the model, the pooling is the mean, and embeddings are
    not normalized.

    Attributes:
        pooling: How the vectors of the tokens are combined into one embedding.
        normalize: Whether embeddings are scaled to norm 1.
        prompt: Text that precedes each text.
        prompt_name: The name of one of the folder's prompts, instead of `prompt`.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    prompt: str | None = None
    prompt_name: str | None = None

    def __post_init__(self) -> None:
        check_option_combination({"--prompt": self.prompt, "--prompt-name": self.prompt_name})
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
) -> StreamResult:
    """Compute an embedding for each text of a file, and write the embeddings to a file or to standard output.

    Args:
        model: A Hugging Face or sentence-transformers folder with its tokenizer, or its URL.
        data: A file of texts, or its URL, or `-` for standard input.
        out: A file that ends in `.npy`, `.parquet` or `.jsonl`, or its URL, or `-` for JSON lines on standard output.
        options: The options.
        settings: The column names, and what happens to texts that are too long.
        reporter: Reports messages and progress.
        overwrite: Whether embeddings of other settings are replaced.

    Returns:
        The numbers of rows and tokens, and the fraction of padding.

    Raises:
        InputError: The model, an option or a text is invalid, or `out` contains something else.
    """
    extension = ".jsonl" if out == STANDARD_OUTPUT else Path(out).suffix
    if extension not in _EXTENSIONS:
        raise InputError(
            f"{out}: embeddings can be written only as {', '.join(_EXTENSIONS)}; pass a file with one of these extensions"
        )
    with (
        _copy_files_locally(model, data, out) as (path, rows_file, answers_file),
        show_progress("embed", rows_file, answers_file, reporter) as progress,
    ):
        check_run_is_finished(path)
        check_settings_apply(None, settings)
        check_long_row_policy(None, settings)
        check_first_row(rows_file, None, settings)
        own = read_sentence_settings(path, options.pooling) or SentenceSettings(options.pooling or "mean")
        prompt = own.find_prompt(options.prompt_name) if options.prompt is None else options.prompt
        if prompt and not own.pools_prompt:
            raise InputError(
                f"{path}: the model excludes prompts from mean pooling, which is not supported; pass --prompt ''"
            )
        normalize = own.normalize if options.normalize is None else options.normalize
        loaded = load_encoder(path, own, options, normalize=normalize)
        for note in loaded.notes:
            reporter.say(note)
        length, width = loaded.max_sequence_length, min(own.truncate_dim or loaded.runner.width, loaded.runner.width)
        rows = RowSource(rows_file, settings, loaded.tokenizer, length, prompt=prompt)
        chosen = {
            "pooling": own.pooling,
            "normalize": normalize,
            "max_sequence_length": length,
            "precision": loaded.precision,
            "packed": options.packed,
            "ending": extension,
            **({"prompt": prompt} if prompt else {}),
            **({"values": width} if width < loaded.runner.width else {}),
        }
        # If a text cannot be read, all values of its embedding are NaN. Embeddings of other texts never contain NaN.
        is_lines, no_vector = extension == ".jsonl", np.full(width, np.nan, np.float32).tobytes()

        def encoded(vectors: Float32Array, sequences: Sequences, embedded: Sequence[Row]) -> list[bytes]:
            """Encode each embedding as a JSON line or as plain float32 bytes, depending on the output file."""
            shortened = own.truncate_vectors(vectors, renormalize=options.normalize is True)
            if not is_lines:
                return [vector.tobytes() for vector in shortened]
            # Nine significant digits distinguish every float32 from its neighbours.
            return [
                _encode_json_line({"embedding": [float(f"{value:.9g}") for value in vector]})
                for vector in shortened.tolist()
            ]

        def problem(why: str) -> bytes:
            """Return the output for a text that cannot be read, which is either a JSON line with the problem or an embedding
            of NaN.
            """
            return _encode_json_line({"error": why}) if is_lines else no_vector

        signature = rows.make_signature("embed", chosen, loaded.identity)
        with open_prediction_output(answers_file, signature, rows, reporter, overwrite=overwrite, task=progress) as output:
            convert = None if is_lines else partial(_convert_embeddings, extension, width)
            return _write_predictions(rows, loaded, output, encoded, problem, convert)


def _convert_embeddings(extension: str, width: int, float32_file: Path, output: BinaryIO) -> None:
    """Convert the float32 values that were collected in a partial file to a numpy or Parquet file of embeddings.

    Args:
        extension: The file extension of the output, `.npy` or `.parquet`.
        width: The number of values in an embedding.
        float32_file: The partial file with the float32 values.
        output: The file to write.
    """
    vectors = np.memmap(float32_file, np.float32, "r").reshape(-1, width)
    if extension != ".parquet":
        np.save(output, vectors)
        return
    pyarrow = require_pyarrow()
    from pyarrow import parquet

    schema = pyarrow.schema([("embedding", pyarrow.list_(pyarrow.float32(), width))])
    with parquet.ParquetWriter(output, schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, len(vectors), _ROWS_PER_ROW_GROUP):
            flat = pyarrow.array(vectors[first : first + _ROWS_PER_ROW_GROUP].reshape(-1), pyarrow.float32())
            column = pyarrow.FixedSizeListArray.from_arrays(flat, width)
            writer.write_table(pyarrow.table([column], schema=schema))


# --- how much faster bfloat16 is than float32 on this CPU, with a small BERT, for `doctor`

# The measurement uses a small model with the layer sizes of MiniLM. Two layers are enough, because every layer takes the
# same time.
_BENCHMARK_CONFIG = BertConfig(
    vocab_size=1000, hidden_size=384, num_hidden_layers=2, num_attention_heads=12, intermediate_size=1536
)
BENCHMARK_SHAPES = {"8 rows of 256 tokens": (8, 256), "1 row of 16 tokens": (1, 16)}
_BENCHMARK_SECONDS = 0.5  # how long the batches of each shape are measured


def measure_bfloat16_time_ratios() -> dict[str, float]:
    """Measure how long batches take in bfloat16 on this CPU, compared with float32. The measurement takes about a second.

    Returns:
        The shortest time of a batch in bfloat16 divided by the shortest time in float32, for each shape by its description.
    """
    models: dict[ComputeDtype, Model] = {kind: build_benchmark_model(kind) for kind in ("float32", "bfloat16")}
    return {name: _measure_time_ratio(models, make_benchmark_batch(*shape)) for name, shape in BENCHMARK_SHAPES.items()}


def build_benchmark_model(compute_dtype: ComputeDtype) -> Model:
    """Return a small BERT for inference. Its frozen weights are random, but the same in every call."""
    model = load_engine("pytorch").build_model(
        ModelSpec(_BENCHMARK_CONFIG, VectorHead("mean", normalize=True)), seed=1, compute_dtype=compute_dtype
    )
    model.freeze()
    return model


def make_benchmark_batch(rows: int, length: int) -> BatchArrays:
    """Return a batch of `rows` rows that contain one text of `length` tokens each.

    The token ids are random, but the same in every call.
    """
    ids = np.random.default_rng(1).integers(5, _BENCHMARK_CONFIG.vocab_size, (rows, length), np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    return {
        "input_ids": ids,
        "input_mask": np.ones_like(ids),
        "segment_ids": np.zeros_like(ids),
        "positions": positions,
        "sequence_positions": np.zeros((rows, 1), np.int32),
    }


def _measure_time_ratio(models: dict[ComputeDtype, Model], batch: BatchArrays) -> float:
    """Run the batch repeatedly in both data types, and return the shortest time in bfloat16 divided by the shortest time in
    float32.
    """
    shortest = dict.fromkeys(models, np.inf)
    for model in models.values():
        model.compute_outputs(batch)  # not timed, because the first batch also allocates memory
    end = time.perf_counter() + _BENCHMARK_SECONDS
    while time.perf_counter() < end:
        for kind, model in models.items():
            begun = time.perf_counter()
            model.compute_outputs(batch)
            shortest[kind] = min(shortest[kind], time.perf_counter() - begun)
    return float(shortest["bfloat16"] / shortest["float32"])
