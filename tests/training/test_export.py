"""Export: others load what we write and compute what we compute; and what is refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import pipeline_from_mapping
from gaudi_bert.engines.tensorflow.bert import outputs_of_every_token
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.sequences import join_sequences
from gaudi_bert.tasks.models.export import export
from gaudi_bert.training.checkpoint import Checkpoint, find_checkpoint, read_checkpoint, write_checkpoint
from gaudi_bert.training.train import train
from gaudi_bert.training.weights import read_weights
from tests.builders import training_data as data
from tests.builders.agree import agree, identical
from tests.builders.engine_models import pretraining_model
from tests.builders.reporters import QUIET

BOUND = 1e-5
OUTPUTS = ("sequence_output", "pooled_output", "masked_lm_logits", "next_sentence_logits")


@pytest.fixture
def causal(whole_run, tmp_path) -> Path:
    """The weights of the run in a model of another attention."""
    stored = read_checkpoint(find_checkpoint(whole_run))
    settings = {**stored.settings, "model": {**stored.settings["model"], "attention": "causal"}}
    write_checkpoint(tmp_path / "causal", Checkpoint(1, stored.variables, settings=settings))
    return tmp_path / "causal"


def expected(run: Path, packs) -> dict[str, np.ndarray]:
    stored = read_checkpoint(find_checkpoint(run))
    model = pretraining_model(BertConfig.from_json(stored.settings["model"]), None)
    model.load_values(stored.variables)
    depth = max(map(len, packs))
    batch = join_sequences(packs, data.LENGTH, data.MASKED_SLOTS if depth > 1 else data.PREDICTIONS, depth)
    tensors = {name: tf.constant(value) for name, value in batch.items()}
    hidden_BLH, outputs = outputs_of_every_token(model.network(), tensors)
    return {name: value.numpy() for name, value in zip(OUTPUTS, (hidden_BLH, *outputs), strict=True)}


@pytest.mark.parametrize("kind", ["huggingface", "google"])
def test_there_and_back_again_to_the_bit(whole_run, tmp_path, kind) -> None:
    result = export(whole_run, tmp_path / "out", kind=kind, reporter=QUIET)
    assert result.vocabulary.endswith("train/vocab.txt")
    assert "vocab.txt" in result.files
    ours, theirs = read_weights(whole_run), read_weights(tmp_path / "out")
    assert (theirs.kind, theirs.config) == (kind, ours.config)
    identical(dict(theirs.variables), dict(ours.variables))
    other = {"huggingface": "google", "google": "huggingface"}[kind]
    export(tmp_path / "out", tmp_path / "other", kind=other, reporter=QUIET)
    identical(dict(read_weights(tmp_path / "other").variables), dict(ours.variables))
    assert (tmp_path / "other" / "vocab.txt").is_file()


def test_transformers_loads_it_and_computes_the_same(whole_run, tmp_path) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    export(whole_run, tmp_path / "out", kind="huggingface", reporter=QUIET)
    model, loading = transformers.BertForPreTraining.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    sequence = data.make_packs(1)[0][0]
    with torch.no_grad():
        theirs = model.eval()(
            input_ids=torch.tensor(sequence.input_ids[np.newaxis], dtype=torch.long),
            token_type_ids=torch.tensor(sequence.segment_ids[np.newaxis], dtype=torch.long),
        )
    ours = expected(whole_run, [[sequence]])
    words = theirs.prediction_logits[0].numpy()[sequence.masked_positions]
    assert np.abs(words).max() > 0.1
    agree(ours["masked_lm_logits"][0, : len(words)], words, BOUND, scale=1.0)
    agree(ours["next_sentence_logits"][0, 0], theirs.seq_relationship_logits[0].numpy(), BOUND, scale=1.0)
    tokenizer = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert tokenizer == {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "model_max_length": 40}


SERVE = """
import sys
import numpy as np
import tensorflow as tf
loaded = tf.saved_model.load(sys.argv[1])
for signature in sys.argv[2:]:
    served = loaded.signatures[signature]
    assert all(spec.shape.is_fully_defined() for spec in served.structured_input_signature[1].values())
    results = served(**{name: tf.constant(value) for name, value in np.load(f"{signature}.npz").items()})
    np.savez(f"{signature}-served.npz", **{name: value.numpy() for name, value in results.items()})
assert "gaudi_bert" not in sys.modules
"""


def served(folder: Path, batches: dict[str, dict[str, np.ndarray]], tmp_path: Path) -> list[dict[str, np.ndarray]]:
    """What a process that knows nothing of this package computes with each signature."""
    for signature, batch in batches.items():
        np.savez(tmp_path / f"{signature}.npz", **batch)
    command = [sys.executable, "-P", "-c", SERVE, str(folder), *batches]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return [dict(np.load(tmp_path / f"{signature}-served.npz")) for signature in batches]


def test_a_saved_model_serves_packs_and_single_sequences(whole_run, causal, tmp_path) -> None:
    """Of a model with causal attention, which no other format can hold."""
    folder = tmp_path / "out"
    vocabulary = whole_run.parent / "examples" / "vocab.txt"
    result = export(causal, folder, kind="savedmodel", rows=2, vocabulary=vocabulary, reporter=QUIET)
    assert result.sizes == {"B": 2, "L": data.LENGTH, "P": data.PREDICTIONS, "Q": data.MASKED_SLOTS, "S": data.DEPTH}
    assert (folder / "assets" / "vocab.txt").is_file()
    packs = data.make_packs(3)[1:]
    singles = [[pack[0]] for pack in packs]
    names = ["input_ids", "input_mask", "segment_ids", "masked_lm_positions"]
    packed_batch = join_sequences(packs, data.LENGTH, data.MASKED_SLOTS, data.DEPTH)
    single_batch = join_sequences(singles, data.LENGTH, data.PREDICTIONS, 1)
    batches = {
        "packed": {name: packed_batch[name] for name in [*names, "positions", "next_sentence_positions"]},
        "serving_default": {name: single_batch[name] for name in names},
    }
    for rows, outputs in zip((packs, singles), served(folder, batches, tmp_path), strict=True):
        right = expected(causal, rows)
        agree(outputs, {name: right[name] for name in outputs}, BOUND, scale=1.0)


def test_what_is_there_stays_unless_told_otherwise(whole_run, tmp_path) -> None:
    out = tmp_path / "out"
    export(whole_run, out, kind="google", reporter=QUIET)
    with pytest.raises(InputError, match="exists already; choose another folder, or pass --overwrite"):
        export(whole_run, out, kind="huggingface", reporter=QUIET)
    export(whole_run, out, kind="huggingface", reporter=QUIET, overwrite=True)
    assert sorted(file.name for file in out.iterdir()) == [
        *("config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt")
    ]


def test_what_cannot_be_exported_is_refused(whole_run, causal, tmp_path) -> None:
    with pytest.raises(InputError, match="--format onnx: choose one of huggingface, google, savedmodel"):
        export(whole_run, tmp_path / "out", kind="onnx", reporter=QUIET)
    with pytest.raises(InputError, match="no such folder"):
        export(tmp_path / "nothing", tmp_path / "out", kind="google", reporter=QUIET)
    with pytest.raises(InputError, match="its attention is causal; only savedmodel can hold that"):
        export(causal, tmp_path / "out", kind="huggingface", reporter=QUIET)
    (tmp_path / "vocab.txt").write_text("word\n" * (data.VOCABULARY + 1))
    with pytest.raises(InputError, match="has 62 tokens, the model has 61; give the vocabulary"):
        export(whole_run, tmp_path / "out", kind="google", vocabulary=tmp_path / "vocab.txt", reporter=QUIET)
    assert not (tmp_path / "out").exists()


def test_phase_2_goes_on_from_phase_1_where_both_have_all_positions(whole_run, tmp_path) -> None:
    """Records of 23 positions here, in a model of 40: another run takes it up with the same positions, not with others."""
    packed = whole_run.parent / "packed" / "train"
    model = read_weights(whole_run).config
    assert model is not None
    sizes = {name: value for name, value in model.to_json().items() if name != "initializer_range"}
    training = {"updates": 1, "warmup_updates": 0, "global_batch_sequences": 16, "micro_batch_packs": 8}
    for positions, fits in ((40, True), (23, False)):
        values = {**sizes, "max_position_embeddings": positions}
        settings = pipeline_from_mapping(
            {"model": values, "training": {**training, "init_checkpoint": str(whole_run)}}, "test"
        )
        if fits:
            said = io.StringIO()
            train(settings, packed, None, tmp_path / str(positions), reporter=Reporter(said))
            assert "starts from the weights of" in said.getvalue()
        else:
            with pytest.raises(InputError, match="is 40 there, 23 here; positions cannot be cut off or added"):
                train(settings, packed, None, tmp_path / str(positions), reporter=QUIET)
