"""Stage export: weights of any kind that we read, as a folder of `transformers`.

`config.json` and `model.safetensors` are in the layout of `BertForPreTraining`; the vocabulary, where it is known, is
`vocab.txt`. The folder has a hidden name until it is complete.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.numpy import save

from gaudi_bert.artefacts.mirrored_folder import local_copies, mirrored, names_in, publish, remove
from gaudi_bert.artefacts.results import PlainResult
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file, exclusive_lock, explain_os_errors, flush_folder, open_file, write_json
from gaudi_bert.common.progress import Reporter, format_count
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.model.config import BertConfig, count_parameters
from gaudi_bert.tasks.task_models import check_finished
from gaudi_bert.training.weights import Weights, local_weights, read_weights, to_hugging_face


def export(
    checkpoint: Path, out: Path, *, vocabulary: Path | None = None, reporter: Reporter, overwrite: bool = False
) -> PlainResult:
    """Write weights of ours, of Hugging Face or of Google as a folder that `transformers` opens.

    `vocabulary` is their vocab.txt; None for the one in its usual folder. With `overwrite`, what is in `out` is replaced.
    """
    with local_weights(checkpoint) as weights, local_copies((vocabulary,)) as (words,), mirrored(out) as folder:
        exists = bool(names_in(folder)) if folder.is_dir() else folder.exists()
        if exists and not overwrite:
            raise InputError(f"{folder}: exists already; choose another folder, or pass --overwrite")
        check_finished(weights)
        return _export(read_weights(weights), folder.resolve(), words, reporter)


def _export(weights: Weights, out: Path, vocabulary: Path | None, reporter: Reporter) -> PlainResult:
    """A model with its pretraining heads, and its vocabulary."""
    config = weights.config
    if config is None:
        raise InputError(f"{weights.path}: its config is not known; put bert_config.json next to it")
    if weights.missing:
        raise InputError(f"{weights.path}: {weights.missing[0]} is missing; export a model with its pretraining heads")
    if config.attention != "bidirectional":
        raise InputError(f"{weights.path}: its attention is {config.attention}; a BERT of transformers sees both sides")
    words = _vocabulary(weights, config, vocabulary, reporter)
    temporary = out.with_name(f".{out.name}.tmp")
    with exclusive_lock(out, str(out)), explain_os_errors(out, "write"):
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        _write_model(temporary, weights, config, words)
        remove(*(out / name for name in names_in(out)) if out.is_dir() else (out,))
        temporary.replace(out)
        flush_folder(out.parent)
    # The file that identifies a folder as a model is uploaded last.
    files = sorted(out.iterdir(), key=lambda path: path.name == "config.json")
    publish(*files)
    names = tuple(sorted(file.name for file in files))
    reporter.say(f"export: {weights.path} ({weights.kind}): {', '.join(names)}")
    parameters, known = count_parameters(config), "without a vocabulary" if words is None else f"with the vocabulary {words}"
    return PlainResult(
        [f"{format_count(parameters, 'parameter')} in {', '.join(names)}, {known}"],
        {"files": names, "parameters": parameters, "vocabulary": None if words is None else str(words)},
    )


def _write_model(folder: Path, weights: Weights, config: BertConfig, vocabulary: Path | None) -> None:
    with atomic_file(folder / "model.safetensors") as handle:
        handle.write(save(to_hugging_face(weights.variables), metadata={"format": "pt"}))
    values = {name: value for name, value in config.to_json().items() if name != "attention"}
    known = {"architectures": ["BertForPreTraining"], "model_type": "bert", "pad_token_id": 0}
    write_json(folder / "config.json", {**known, **values})
    if vocabulary is None:
        return
    shutil.copyfile(vocabulary, folder / "vocab.txt")
    settings = _run_folder(weights) / "settings.yaml"
    if weights.kind == "gaudi-bert" and settings.is_file():
        tokenizer = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": load_pipeline(settings).prepare.lower_case,
            "model_max_length": config.max_position_embeddings,
        }
        write_json(folder / "tokenizer_config.json", tokenizer)


def _vocabulary(weights: Weights, config: BertConfig, given: Path | None, reporter: Reporter) -> Path | None:
    """The vocabulary that was given, or one in its usual folder; it may not be larger than the model's."""
    run = _run_folder(weights)
    folders = (run, run.parent / "examples", weights.path, weights.path.parent)
    path = given or next((file for folder in folders if (file := folder / "vocab.txt").is_file()), None)
    if path is None:
        return None
    with explain_os_errors(path, "read"):
        words = sum(1 for _ in open_file(path))
    if words <= config.vocab_size:
        return path
    problem = f"{path}: has {words:,} tokens, the model has {config.vocab_size:,}"
    if given is not None:
        raise InputError(f"{problem}; give the vocabulary that it was trained with")
    reporter.say(f"note: {problem}, so it is omitted")
    return None


def _run_folder(weights: Weights) -> Path:
    return weights.path.resolve().parent.parent
