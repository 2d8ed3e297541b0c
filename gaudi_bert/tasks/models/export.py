"""Stage export: weights of any kind that we read, in a format that others read.

- `huggingface`: `config.json` and `model.safetensors` in the layout of `BertForPreTraining`.
- `google`: a TF1 checkpoint `bert_model.ckpt` and `bert_config.json`, with the names of google-research/bert.
- `savedmodel`: a TensorFlow SavedModel for serving (see `engines/tensorflow/stored_models.py`).

With the vocabulary, where it is known, as `vocab.txt`. The folder has a hidden name until it is complete.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from gaudi_bert.artefacts.store.mirrored_folder import local_copies, mirrored, names_in, publish, remove
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file, exclusive_lock, explained_os_errors, flush_folder, open_file, write_json
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.engines.choose import choose_engine, load_engine
from gaudi_bert.model.config import BertConfig, parameter_count
from gaudi_bert.model.heads import TaskHead
from gaudi_bert.model.huggingface import to_hugging_face
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.rows.window_plan import deepest
from gaudi_bert.tasks.models.task_models import check_finished, open_model, read_task_folder, start_weights
from gaudi_bert.training.model_files import TaskConfig
from gaudi_bert.training.weights import Weights, local_weights, read_weights

Format = Literal["huggingface", "google", "savedmodel"]
FORMATS: tuple[str, ...] = get_args(Format)

_LAST = ("config.json", "bert_config.json", "saved_model.pb")
TASK_HEADS = ("BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering")

# Of sizes that nothing records: BERT masks 15 % of a sequence, and packs of three are what was published.
MASKED_SHARE, COMMON_DEPTH = 0.15, 3


@dataclass(frozen=True)
class ExportResult:
    """What was written: its files, the model's parameters, the vocabulary next to it, a SavedModel's sizes."""

    format: str
    files: tuple[str, ...]
    parameters: int
    vocabulary: str | None
    sizes: dict[str, int] | None = None


def export(
    checkpoint: Path,
    out: Path,
    *,
    kind: str,
    vocabulary: Path | None = None,
    rows: int = 1,
    reporter: Reporter,
    overwrite: bool = False,
) -> ExportResult:
    """Write a model in another format.

    Args:
        checkpoint: weights of ours, of Hugging Face or of Google.
        kind: one of `FORMATS`.
        vocabulary: its vocab.txt; None for the one in its usual folder.
        rows: `savedmodel`: rows of a batch, fixed.
        overwrite: replace what is in `out`.
    """
    if kind not in FORMATS:
        raise InputError(f"--format {kind}: choose one of {', '.join(FORMATS)}")
    if kind != "huggingface":
        choose_engine("tensorflow", key=f"--format {kind}")  # which writes it; refused where it is not installed
    with local_weights(checkpoint) as weights, local_copies((vocabulary,)) as (words,), mirrored(out) as folder:
        exists = bool(names_in(folder)) if folder.is_dir() else folder.exists()
        if exists and not overwrite:
            raise InputError(f"{folder}: exists already; choose another folder, or pass --overwrite")
        check_finished(weights)
        config = TaskConfig.read_if_present(weights / "config.json") if kind == "savedmodel" else None
        if config is not None and any(name in TASK_HEADS for name in config.architectures or ()):
            return _export_task(weights, folder, rows, reporter)
        return _export(read_weights(weights), folder, kind, words, rows, reporter)


def _export(weights: Weights, out: Path, kind: str, vocabulary: Path | None, rows: int, reporter: Reporter) -> ExportResult:
    """A model with its pretraining heads, and its vocabulary."""
    config = _complete_config(weights, kind)
    words = _vocabulary(weights, config, vocabulary, reporter)
    sizes = _serving_sizes(weights, config, rows)
    with _complete_folder(out.resolve()) as folder:
        if kind == "huggingface":
            _write_hugging_face(folder, weights, config, words)
        elif kind == "google":
            _write_google(folder, weights, config)
        else:
            from gaudi_bert.engines.tensorflow.stored_models import write_saved_model  # loads TensorFlow

            write_saved_model(folder, config, weights.variables, sizes)
        if words is not None:
            shutil.copyfile(words, (folder / "assets" if kind == "savedmodel" else folder) / "vocab.txt")
    files = _files_in(out)
    reporter.say(f"export: {weights.path} ({weights.kind}) as {kind}: {', '.join(files)}")
    return ExportResult(
        format=kind,
        files=files,
        parameters=parameter_count(config),
        vocabulary=str(words) if words is not None else None,
        sizes=sizes if kind == "savedmodel" else None,
    )


def _files_in(out: Path) -> tuple[str, ...]:
    return tuple(sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()))


def _export_task(checkpoint: Path, out: Path, rows: int, reporter: Reporter) -> ExportResult:
    """A fine-tuned model with its head, and its tokenizer among the assets."""
    from gaudi_bert.engines.tensorflow.stored_models import write_task_saved_model  # loads TensorFlow

    task_folder = read_task_folder(checkpoint)
    tokenizer = open_tokenizer(checkpoint)
    task = task_folder.make_task()
    start = start_weights(checkpoint, task, lacks_head=False)
    if not isinstance(start.config, BertConfig):
        raise InputError(f"{checkpoint}: TensorFlow serves BERT only here, this is a {start.kind}; transformers opens it")
    model = open_model(start, task.head, load_engine("tensorflow"))
    length = min(task_folder.max_sequence_length or start.sizes.positions, start.sizes.positions)
    sizes = {"B": rows, "L": length, "S": deepest(length)}
    with _complete_folder(out.resolve()) as folder:
        write_task_saved_model(folder, start.config, cast(TaskHead, task.head), model.values(), sizes)
        shutil.copyfile(tokenizer.file, folder / "assets" / tokenizer.file.name)
    files = _files_in(out)
    reporter.say(f"export: {checkpoint} ({task_folder.task}) as savedmodel: {', '.join(files)}")
    parameters = sum(map(math.prod, model.shapes().values()))
    return ExportResult("savedmodel", files, parameters, str(tokenizer.file), sizes)


def _complete_config(weights: Weights, kind: str) -> BertConfig:
    """The model of `weights`, of which nothing may be missing."""
    if weights.config is None:
        raise InputError(f"{weights.path}: its config is not known; put bert_config.json next to it")
    if weights.missing:
        raise InputError(f"{weights.path}: {weights.missing[0]} is missing; export a model with its pretraining heads")
    if weights.config.attention != "bidirectional" and kind != "savedmodel":
        raise InputError(f"{weights.path}: its attention is {weights.config.attention}; only savedmodel can hold that")
    return weights.config


def _write_hugging_face(folder: Path, weights: Weights, config: BertConfig, vocabulary: Path | None) -> None:
    from safetensors.numpy import save

    with atomic_file(folder / "model.safetensors") as handle:
        handle.write(save(to_hugging_face(weights.variables), metadata={"format": "pt"}))
    values = {name: value for name, value in config.to_json().items() if name != "attention"}
    known = {"architectures": ["BertForPreTraining"], "model_type": "bert", "pad_token_id": 0}
    write_json(folder / "config.json", {**known, **values})
    lower_case = _lower_case(weights)
    if vocabulary is not None and lower_case is not None:
        tokenizer = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": lower_case,
            "model_max_length": config.max_position_embeddings,
        }
        write_json(folder / "tokenizer_config.json", tokenizer)


def _write_google(folder: Path, weights: Weights, config: BertConfig) -> None:
    from gaudi_bert.engines.tensorflow.stored_models import write_google_checkpoint  # loads TensorFlow

    write_google_checkpoint(folder / "bert_model.ckpt", weights.variables)
    values = {name: value for name, value in config.to_json().items() if name != "attention"}
    write_json(folder / "bert_config.json", values)


def _serving_sizes(weights: Weights, config: BertConfig, rows: int) -> dict[str, int]:
    """The sizes, by letter, of the data that a model of ours was trained on; else what is common."""
    data = weights.settings.get("data", {})
    length = data.get("max_sequence_length", config.max_position_embeddings)
    predictions = data.get("max_predictions", max(1, round(MASKED_SHARE * length)))
    depth = data.get("depth", COMMON_DEPTH)
    slots = data.get("masked_slots", predictions + depth)
    return {"B": rows, "L": length, "P": predictions, "Q": slots, "S": depth}


def _vocabulary(weights: Weights, config: BertConfig, given: Path | None, reporter: Reporter) -> Path | None:
    """The vocabulary that was given, or one in its usual folder; it may not be larger than the model's."""
    if given is None:
        run = _run_folder(weights)
        folders = [run, run.parent / "examples", weights.path, weights.path.parent]
        files = [folder / "vocab.txt" for folder in folders if (folder / "vocab.txt").is_file()]
        if not files:
            return None
    path = given if given is not None else files[0]
    with explained_os_errors(path, "read"):
        words = sum(1 for _ in open_file(path))
    if words <= config.vocab_size:
        return path
    problem = f"{path}: has {words:,} tokens, the model has {config.vocab_size:,}"
    if given is not None:
        raise InputError(f"{problem}; give the vocabulary that it was trained with")
    reporter.say(f"note: {problem}, so it is omitted")
    return None


def _lower_case(weights: Weights) -> bool | None:
    """Whether the text was lower-cased; None where nothing tells."""
    settings = _run_folder(weights) / "settings.yaml"
    if weights.kind != "gaudi-bert" or not settings.is_file():
        return None
    return load_pipeline(settings).prepare.lower_case


def _run_folder(weights: Weights) -> Path:
    """The folder of the run, for a checkpoint of ours inside it."""
    return weights.path.resolve().parent.parent


@contextmanager
def _complete_folder(out: Path) -> Iterator[Path]:
    """A hidden folder next to `out` that gets its name at the end."""
    temporary = out.with_name(f".{out.name}.tmp")
    with exclusive_lock(out, str(out)), explained_os_errors(out, "write"):
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        yield temporary
        remove(*(out / name for name in names_in(out)) if out.is_dir() else (out,))
        temporary.replace(out)
        flush_folder(out.parent)
    # The file that identifies a folder as a model is uploaded last.
    publish(*sorted((path for path in out.rglob("*") if path.is_file()), key=lambda path: path.name in _LAST))
