"""`embed` and `predict` with the folder of any encoder: what `transformers` gives each text alone, or a line that helps."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)
transformers = pytest.importorskip("transformers", exc_type=ImportError)

from safetensors.numpy import load_file, save_file  # noqa: E402

from gaudi_bert.common import errors  # noqa: E402
from gaudi_bert.common.errors import InputError, StoppedError, install_command  # noqa: E402
from gaudi_bert.config.values import EngineName  # noqa: E402
from gaudi_bert.model.heads import VectorHead  # noqa: E402
from gaudi_bert.rows.types import Sequences  # noqa: E402
from gaudi_bert.rows.window_plan import PackRunner, plan_window  # noqa: E402
from gaudi_bert.tasks.task_models import load_initial_weights  # noqa: E402
from gaudi_bert.training.weights import read_weights  # noqa: E402
from tests.builders.agree import agree  # noqa: E402
from tests.builders.bert_folder import VOCABULARY, write_bert, write_rows  # noqa: E402
from tests.builders.command_line import Done, refusal, run_command, run_python  # noqa: E402
from tests.builders.encoders import TEXTS, write_encoder  # noqa: E402
from tests.builders.model_packs import BY_EACH_ENGINE, model_of  # noqa: E402
from tests.builders.reporters import StopAfter  # noqa: E402
from tests.tasks.conftest import run  # noqa: E402


def answered(folder: Path, command: str, out: str, *more: str) -> Done:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return run_command(command, "--model", "m", "--data", "texts.jsonl", "--out", out, *more, folder=folder)


def test_an_encoder_of_an_encoder_and_decoder(tmp_path: Path) -> None:
    """Its folder has no decoder, but the folder is not damaged."""
    config = transformers.T5Config(vocab_size=300, d_model=32, d_kv=16, num_heads=2, num_layers=2, d_ff=48)
    transformers.T5EncoderModel(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"model type .t5.: encoder-decoder models are not supported"):
        load_initial_weights(tmp_path, None)


@pytest.mark.parametrize(
    ("name", "command", "message"),
    [
        (
            "deberta",
            "embed",
            "m: model type 'deberta-v2': no mask keeps its sequences separate .*; run it with transformers or sent",
        ),
        (
            "roberta",
            "predict",
            "m: the architecture is RobertaModel, which has no head for a supported task; fine-tune the model first",
        ),
    ],
)
def test_what_cannot_be_served_has_a_way_on(tmp_path: Path, name: str, command: str, message: str) -> None:
    write_encoder(tmp_path / "m", name)
    done = answered(tmp_path, command, "out.jsonl")
    assert done.returncode == 2
    assert re.search(message, done.stderr), done.stderr


def test_without_one_of_both_softwares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: set[str] = set()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in hidden else found(name, *more))
    write_bert(tmp_path / "m")
    write_encoder(tmp_path / "roberta", "roberta")
    assert answered(tmp_path, "embed", "tensorflow.npy").returncode == 0
    hidden.add("tensorflow")
    assert answered(tmp_path, "embed", "pytorch.npy").returncode == 0
    agree(np.load(tmp_path / "pytorch.npy"), np.load(tmp_path / "tensorflow.npy"), 1e-5, scale=1.0)
    hidden |= {"torch", "transformers"}
    done = answered(tmp_path, "embed", "none.npy", "--model", "roberta")
    reason = "roberta: a model of type roberta needs transformers, which is not installed; run: "
    assert (done.returncode, reason in done.stderr) == (2, True)
    monkeypatch.setattr(errors, "_TENSORFLOW_PYTHONS", ())  # as on Python 3.12
    done = answered(tmp_path, "embed", "none.npy")
    assert (done.returncode, done.stderr.rstrip().endswith(install_command("pytorch"))) == (2, True)


@pytest.mark.slow
def test_tensorflow_is_loaded_without_keras_which_comes_when_it_is_asked_for() -> None:
    pytest.importorskip("tensorflow", exc_type=ImportError)
    program = """
import sys
from gaudi_bert.engines import _prevent_keras_import as without_keras
with without_keras():
    import tensorflow as tf
print("keras.src" in sys.modules)
with without_keras():
    pass
print(tf.keras.layers.Dense(2)(tf.ones([1, 3])).shape)
"""
    done = run_python(program)
    assert done.stdout.splitlines() == ["False", "(1, 2)"], done.stderr


def test_a_stopped_run_is_named_with_how_to_finish_it(files: dict[str, Any], tmp_path: Path) -> None:
    write_encoder(tmp_path / "m", "roberta", "AutoModelForMaskedLM")
    out, rows = tmp_path / "stopped", files["classification"]
    with pytest.raises(StoppedError):
        run("classification", *rows, tmp_path / "m", out, StopAfter(4))
    for given in (out, max(out.glob("checkpoints/update-*.safetensors"))):
        for words in (
            ("embed", "--data", rows[1], "--model", given, "--out", "v.npy"),
            ("predict", "--data", rows[1], "--model", given, "--out", "v.jsonl"),
            ("export", "--checkpoint", given, "--out", "v"),
        ):
            said = refusal(*words, folder=tmp_path)
            assert re.search(
                r"`gaudi-bert finetune` that was stopped before its roberta model .* again to finish it$", said
            ), said


TUNE = "finetune --task classification --data rows.jsonl --model m --out tuned --set=finetune.epochs=1"


def test_libraries_print_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No progress bar, table or warning of theirs is among our lines."""
    write_encoder(tmp_path / "m", "roberta", "AutoModelForMaskedLM")
    write_rows(tmp_path / "rows.jsonl", "classification", 17, 1)
    capfd.readouterr()
    for command in (f"{TUNE} --set=finetune.max_sequence_length=61", "embed --model tuned --data rows.jsonl --out v.npy"):
        done = run_command(*command.split(), folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert not re.search("Loading weights|Warning", done.stderr)
        assert capfd.readouterr() == ("", "")


# --- packs are what transformers makes of each sequence alone, in the order of the sequences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    random = np.random.default_rng(5)
    lengths = random.integers(3, 24, 61)
    lengths[7] = 64
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = random.integers(5, len(VOCABULARY), offsets[-1]).astype(np.int32)
    segments = random.integers(0, 2, offsets[-1]).astype(np.int8)
    return Sequences(np.arange(61), offsets, ids, segments)


@pytest.fixture(scope="module")
def alone(folder: Path, sequences: Sequences) -> dict[str, Any]:
    """By transformers, one sequence at a time."""
    model, hidden = transformers.BertModel.from_pretrained(folder).eval(), []
    for number in range(len(sequences)):
        span = slice(int(sequences.offsets[number]), int(sequences.offsets[number + 1]))
        ids = torch.tensor(sequences.input_ids[span][None].astype(np.int64))
        types = torch.tensor(sequences.segment_ids[span][None].astype(np.int64))
        with torch.inference_mode():
            hidden.append(model(input_ids=ids, token_type_ids=types).last_hidden_state[0].numpy())
    pools = {
        "cls": lambda each: each[0],
        "mean": lambda each: each.mean(axis=0),
        "max": lambda each: each.max(axis=0),
        "last": lambda each: each[-1],
    }
    return {name: np.array(list(map(pool, hidden))) for name, pool in pools.items()}


@BY_EACH_ENGINE
@pytest.mark.parametrize(("pooling", "one_shape"), [("cls", False), ("mean", True), ("max", False), ("last", True)])
def test_vectors_of_packs(
    folder: Path, sequences: Sequences, alone: dict[str, Any], pooling: Any, one_shape: bool, engine: EngineName
) -> None:
    weights = read_weights(folder)
    plan = plan_window(sequences.lengths, hidden_size=24, fixed_row_length=64 if one_shape else None)
    assert plan.gain > 1.5
    model = model_of(weights.config, VectorHead(pooling, normalize=False), None, engine)
    model.load_variables({name: weights.variables[name] for name in model.variable_shapes()})
    found = PackRunner(model.compute_outputs, False, 24, 5 * 64, "filled" if one_shape else "single").run(sequences, plan)
    agree(found, alone[pooling], 1e-5, scale=1.0)


def test_weights_without_an_encoder(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if "layer.0.output" not in name}
    save_file(kept, tmp_path / "m" / "model.safetensors")
    with pytest.raises(InputError, match="is missing; pass weights that match"):
        load_initial_weights(tmp_path / "m", None)
