"""The stage `export`, which writes weights of any supported kind as a model folder of `transformers`.

`config.json` and `model.safetensors` have the layout of `BertForPreTraining`. If the vocabulary is known, it is written as
`vocab.txt`. `config.json` is written last, so that an incomplete folder does not look like a model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from gaudi_bert.artefacts.completion import Signature, begin_artefact_unless_finished, check_output_path
from gaudi_bert.artefacts.mirrored_folder import format_path, mirror_folder, open_local_copies
from gaudi_bert.artefacts.results import PlainResult
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file, exclusive_lock, explain_os_errors, open_file, read_file
from gaudi_bert.common.progress import Reporter, format_count
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.model.config import BertConfig, count_parameters
from gaudi_bert.tasks.task_models import check_run_is_finished
from gaudi_bert.training.weights import Weights, convert_to_hugging_face, open_local_weights, read_weights

_CONFIG = "config.json"


def export(
    checkpoint: Path, out: Path, *, vocabulary: Path | None = None, reporter: Reporter, overwrite: bool = False
) -> PlainResult:
    """Write stored weights as a model folder that `transformers` can open, and return a summary.

    Args:
        checkpoint: The weights, in any of the three supported formats.
        out: The folder to create.
        vocabulary: The vocab.txt of the weights. None to look for it in its usual folders.
        reporter: Reports what was written.
        overwrite: Whether a folder that `export` wrote from other weights is replaced.

    Returns:
        The names of the files, the number of parameters and the vocabulary.

    Raises:
        InputError: The weights cannot be exported, or `out` contains other files.
    """
    with (
        open_local_weights(checkpoint) as weights,
        open_local_copies((vocabulary,)) as (words,),
        mirror_folder(out) as folder,
    ):
        check_output_path(folder, folder / _CONFIG, "export", overwrite)
        check_run_is_finished(weights)
        return _write_export(read_weights(weights), folder, words, reporter, overwrite)


def _write_export(weights: Weights, out: Path, vocabulary: Path | None, reporter: Reporter, overwrite: bool) -> PlainResult:
    """Check the weights, write them to the folder `out` with their configuration and vocabulary, and return a summary."""
    config = weights.config
    if config is None:
        raise InputError(f"{weights.path}: the weights have no configuration; put bert_config.json next to the weights")
    if weights.missing_variables:
        raise InputError(
            f"{weights.path}: {weights.missing_variables[0]} is missing; pass a model that contains the pretraining heads"
        )
    if config.attention != "bidirectional":
        raise InputError(
            f"{weights.path}: the attention is {config.attention}, but BERT models in transformers have bidirectional "
            "attention; pass a model with bidirectional attention"
        )
    words = _find_vocabulary(weights, config, vocabulary, reporter)
    files = _build_files(weights, config, words)
    signature = Signature("export", {}, {name: hashlib.sha256(content).hexdigest() for name, content in files.items()})
    with exclusive_lock(out, str(out)):
        is_done = begin_artefact_unless_finished(out, out / _CONFIG, signature, overwrite)
        for name, content in () if is_done else files.items():
            with atomic_file(out / name) as handle:
                handle.write(content)
    names = tuple(sorted(files))
    done = "already complete, nothing to do" if is_done else f"{weights.path} ({weights.kind}): {', '.join(names)}"
    reporter.say(f"{format_path(out) if is_done else 'export'}: {done}")
    parameters, known = count_parameters(config), "without a vocabulary" if words is None else f"with the vocabulary {words}"
    return PlainResult(
        [f"{format_count(parameters, 'parameter')} in {', '.join(names)}, {known}"],
        {"files": names, "parameters": parameters, "vocabulary": None if words is None else str(words)},
    )


def _build_files(weights: Weights, config: BertConfig, vocabulary: Path | None) -> dict[str, bytes]:
    """Create the files of the model folder in memory, and return their contents by name. They must be written in this order,
    so that config.json comes last.
    """
    files = {"model.safetensors": save(convert_to_hugging_face(weights.variables), metadata={"format": "pt"})}
    if vocabulary is not None:
        files["vocab.txt"] = read_file(vocabulary)
        settings = _get_run_folder(weights) / "settings.yaml"
        if weights.kind == "gaudi-bert" and settings.is_file():
            files["tokenizer_config.json"] = _encode_json(
                {
                    "tokenizer_class": "BertTokenizer",
                    "do_lower_case": load_pipeline(settings).prepare.lower_case,
                    "model_max_length": config.max_position_embeddings,
                }
            )
    content = {"architectures": ["BertForPreTraining"], "model_type": "bert", "pad_token_id": 0}
    content |= {name: value for name, value in config.to_json().items() if name != "attention"}
    return {**files, _CONFIG: _encode_json(content)}


def _encode_json(value: dict[str, Any]) -> bytes:
    """Encode a JSON object as indented UTF-8 text."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _find_vocabulary(weights: Weights, config: BertConfig, requested_path: Path | None, reporter: Reporter) -> Path | None:
    """Return the path of the vocabulary to export. If `requested_path` is None, look for a `vocab.txt` near the weights, and
    return None if there is none.

    Raises:
        InputError: The requested vocabulary has more tokens than the model. If a `vocab.txt` that was found near the weights
            has too many tokens, it is omitted without an error.
    """
    run = _get_run_folder(weights)
    folders = (run, run.parent / "examples", weights.path, weights.path.parent)
    path = requested_path or next((file for folder in folders if (file := folder / "vocab.txt").is_file()), None)
    if path is None:
        return None
    with explain_os_errors(path, "read"):
        words = sum(1 for _ in open_file(path))
    if words <= config.vocab_size:
        return path
    problem = f"{path}: the vocabulary has {words:,} tokens, but the model has only {config.vocab_size:,}"
    if requested_path is not None:
        raise InputError(f"{problem}; pass the vocabulary with which the model was trained")
    reporter.say(f"note: {problem}, so the vocabulary is not exported")
    return None


def _get_run_folder(weights: Weights) -> Path:
    """Return the folder of the training run that wrote the weights."""
    return weights.path.resolve().parent.parent
