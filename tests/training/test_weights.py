"""Weights from three kinds of files, to the bit; the one rule of what fits; and the files that export writes for others."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import pipeline_from_mapping
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.engines.protocol import Model
from gaudi_bert.engines.tensorflow.bert import outputs_of_every_token
from gaudi_bert.engines.tensorflow.stored_models import write_google_checkpoint
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.features import join_sequences
from gaudi_bert.model.huggingface import to_hugging_face
from gaudi_bert.rows.packs import BatchShape, Packs, lay_out_packs
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.rows.tokenizing import tokenize_rows
from gaudi_bert.rows.types import RowPosition, TextRow
from gaudi_bert.tasks.models.export import export
from gaudi_bert.training.checkpoint import Checkpoint, find_checkpoint, is_checkpoint, read_checkpoint, write_checkpoint
from gaudi_bert.training.train import train
from gaudi_bert.training.weights import load_weights, read_weights
from tests.builders import training_data as data
from tests.builders.agree import agree, identical
from tests.builders.model_packs import pretraining_model
from tests.builders.reporters import QUIET
from tests.tasks.test_predict import TEXTS, logits_alone, write_model

SIZES = {
    "vocab_size": 11,
    "hidden_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 5,
    "max_position_embeddings": 7,
}


def make_model(seed: int = 3, **changes) -> Model:
    return pretraining_model(BertConfig(**{**SIZES, **changes}), seed)


def save_ours(folder, model):
    checkpoint = Checkpoint(4, model.values(), settings={"model": model.spec.config.to_json()})
    return write_checkpoint(folder / "checkpoints", checkpoint)


def save_hugging_face(folder, model):
    folder.mkdir(parents=True)
    save_file(to_hugging_face(model.values()), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**model.spec.config.to_json(), "model_type": "bert"}))
    return folder


def save_google(folder, model):
    folder.mkdir(parents=True)
    write_google_checkpoint(folder / "bert_model.ckpt", model.values())
    (folder / "bert_config.json").write_text(json.dumps(model.spec.config.to_json()))
    return folder


SAVERS = {"gaudi-bert": save_ours, "huggingface": save_hugging_face, "google": save_google}


@pytest.mark.parametrize("kind", SAVERS)
def test_weights_come_back_to_the_bit_and_dropout_may_differ(tmp_path, kind) -> None:
    model = make_model()
    SAVERS[kind](tmp_path / "there", model)
    other = make_model(seed=8, hidden_dropout_prob=0.5)
    weights = load_weights(tmp_path / "there", other, other.spec.config)
    assert (weights.kind, weights.config, weights.missing) == (kind, model.spec.config, [])
    identical(other.values(), model.values())


@pytest.mark.parametrize("kind", SAVERS)
@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("max_position_embeddings", 9, "is 7 there, 9 here; positions cannot be cut off or added; set model.max_pos"),
        ("max_position_embeddings", 5, "is 7 there, 5 here; positions cannot be cut off or added"),
        ("num_attention_heads", 3, "num_attention_heads is 2 there, 3 here; set model.num_attention_heads to 2"),
        ("hidden_act", "relu", "hidden_act is gelu there, relu here"),
    ],
)
def test_another_function_is_refused_and_nothing_is_changed(tmp_path, kind, setting, value, said) -> None:
    SAVERS[kind](tmp_path / "there", make_model())
    other = make_model(seed=8, **{setting: value})
    before = other.values()
    with pytest.raises(InputError, match=said):
        load_weights(tmp_path / "there", other, other.spec.config)
    identical(other.values(), before)


def test_a_bare_encoder_leaves_the_heads_as_they_are(tmp_path) -> None:
    model, other = make_model(), make_model(seed=8)
    folder = save_hugging_face(tmp_path / "there", model)
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items() if name.startswith("bert.")}
    save_file({name: value for name, value in tensors.items() if "pooler" not in name}, folder / "model.safetensors")
    heads = {name: value for name, value in other.values().items() if name.startswith(("cls/", "bert/pooler/"))}
    weights = load_weights(folder, other, other.spec.config)
    assert set(weights.missing) == set(heads)
    after = other.values()
    identical({name: after[name] for name in heads}, heads)
    identical({name: value for name, value in after.items() if name not in heads}, weights.variables)


def test_a_model_in_several_files_is_read_as_one(tmp_path) -> None:
    model = make_model()
    folder = save_hugging_face(tmp_path / "there", model)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: value for name, value in tensors.items() if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    identical(dict(read_weights(folder).variables), model.values())


def test_what_tf1_saver_writes_while_training_is_read_without_the_optimiser(tmp_path) -> None:
    """The names of a training checkpoint: moments below each variable, counters beside them; written by TF1's own saver."""
    values = make_model().values()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name, value in values.items():
            for variable in (name, f"{name}/adam_m", f"{name}/adam_v"):
                tf.compat.v1.get_variable(variable, initializer=value, use_resource=False)
        tf.compat.v1.get_variable("global_step", initializer=np.int64(28252), use_resource=False)
        session.run(tf.compat.v1.global_variables_initializer())
        prefix = tf.compat.v1.train.Saver().save(session, str(tmp_path / "model.ckpt"), global_step=28252)
    for path in (prefix, tmp_path, tmp_path / "model.ckpt-28252.index"):
        weights = read_weights(path)
        assert (weights.kind, weights.config) == ("google", None)
        identical(weights.variables, values)
    other = make_model(seed=8)
    load_weights(prefix, other, other.spec.config)
    identical(other.values(), values)
    with pytest.raises(InputError, match=r"word_embeddings is \[11, 6\] there, \[12, 6\] here"):
        load_weights(prefix, (wider := make_model(vocab_size=12)), wider.spec.config)


def test_tf1_saver_restores_what_we_write(tmp_path) -> None:
    values = make_model().values()
    write_google_checkpoint(tmp_path / "bert_model.ckpt", values)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = {
            name: tf.compat.v1.get_variable(name, shape=value.shape, use_resource=False) for name, value in values.items()
        }
        tf.compat.v1.train.Saver().restore(session, str(tmp_path / "bert_model.ckpt"))
        identical(session.run(variables), values)


def test_damage_is_one_line_with_its_remedy(tmp_path) -> None:
    model = make_model()

    def refused(path: Path, message: str) -> None:
        with pytest.raises(InputError, match=message):
            read_weights(path)

    folder = save_hugging_face(tmp_path / "theirs", model)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-10])
    refused(folder, r"cannot be read \(.*\); copy it again")
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").unlink()
    refused(folder / "model.safetensors", r"config\.json is missing next to it; copy the complete folder")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"pytorch_model\.bin only; save it with")
    google = save_google(tmp_path / "google", model)
    (google / "bert_model.ckpt.index").write_bytes(b"nonsense")
    refused(google, "not a complete TF1 checkpoint")
    write_google_checkpoint(tmp_path / "other.ckpt", {"dense/kernel": np.zeros(3, np.float32)})
    refused(tmp_path / "other.ckpt", "holds no variable below bert/")
    write_google_checkpoint(google / "second.ckpt", model.values())
    refused(google, "holds 2 TF1 checkpoints; name one")
    refused(tmp_path / "nothing", "no such folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no checkpoint there")


def test_our_files_are_told_from_others(tmp_path) -> None:
    ours = save_ours(tmp_path / "run", make_model())
    theirs = save_hugging_face(tmp_path / "theirs", make_model()) / "model.safetensors"
    assert (is_checkpoint(ours), is_checkpoint(theirs)) == (True, False)
    ours.rename(tmp_path / "renamed.safetensors")
    assert read_weights(tmp_path / "renamed.safetensors").kind == "gaudi-bert"


# --- a fine-tuned model as a SavedModel: rows alone and packs get the logits that transformers gives


def test_packs_are_served(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "BertForSequenceClassification", num_labels=3)
    out = tmp_path / "served"
    sizes = export(tmp_path / "m", out, kind="savedmodel", rows=2, reporter=QUIET).sizes
    assert sizes == {"B": 2, "L": 64, "S": 16}
    assert (out / "assets" / "vocab.txt").is_file()
    texts = TEXTS[:5]
    rows = [TextRow(RowPosition(number), text) for number, text in enumerate(texts, 1)]
    tokenizer = open_tokenizer(tmp_path / "m")
    sequences = tokenize_rows(rows, tokenizer, task=None, settings=TaskSettings(), max_sequence_length=64)
    packs = Packs(np.array([4, 1, 0, 3, 2]), np.array([0, 3, 5]))
    placed = lay_out_packs(sequences, packs, np.arange(2), BatchShape(2, 64, 16))
    unread = ("sequence_weights", "last_positions")
    features = {name: tf.constant(value) for name, value in placed.features(sequences).items() if name not in unread}
    signatures = tf.saved_model.load(str(out)).signatures
    found = np.zeros((5, 3), np.float32)
    placed.scatter_sequences(signatures["packed"](**features)["logits"].numpy(), found)
    expected = np.concatenate([logits_alone(model, tmp_path / "m", text).logits.numpy() for text in texts])
    agree(found, expected, 1e-5, scale=1.0)
    alone = lay_out_packs(sequences, Packs(np.arange(2), np.arange(3)), np.arange(2), BatchShape(2, 64, 1)).features(
        sequences
    )
    row_inputs = {name: tf.constant(alone[name]) for name in ("input_ids", "input_mask", "segment_ids")}
    served = signatures["serving_default"](**row_inputs)["logits"].numpy()[:, 0]
    agree(served, expected[:2], 1e-5, scale=1.0)


# --- export: others load what we write and compute what we compute; and what is refused


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
