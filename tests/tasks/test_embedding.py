"""Embedding models: a run by either engine, in any micro-batches, and by sentence-transformers; its folder, opened there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from gaudi_bert.common.errors import InputError, StoppedError
from gaudi_bert.config.pipeline import PipelineSettings, section_from_mapping
from gaudi_bert.config.sections import TaskSettings, TrainingSettings
from gaudi_bert.runs.finetune import finetune
from gaudi_bert.runs.labelled_data import FineTuneFiles
from gaudi_bert.tasks.predict import EmbedOptions, embed
from gaudi_bert.training.loop import compute_learning_rate
from tests.builders.agree import agree
from tests.builders.bert_folder import without_dropout, write_bert
from tests.builders.encoders import TOKENIZER, write_encoder
from tests.builders.json_lines import losses_of, write_lines
from tests.builders.launched import TORCHRUN, finished, kill_at
from tests.builders.reporters import QUIET, Listener, StopAfter
from tests.tasks.conftest import run

pytestmark = pytest.mark.slow

WORDS = ("cat", "dog", "hill", "river", "mat", "north", "south", "sat", "runs", "flows", "over", "the", "on", "and")


def sentences(count: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(1, 9), replace=False)) for _ in range(count)]


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Of a text and what it begins with; of some rows with negatives, of some with a text of another row."""
    random = np.random.default_rng(seed)
    rows = []
    for number, text in enumerate(sentences(count, seed)):
        row: dict[str, Any] = {"anchor": text.split()[0], "positive": f"{text} {number % 7}"}
        if number % 3 == 0:
            row["negatives"] = sentences(int(random.integers(1, 4)), 100 + number)
        rows.append(row)
    return rows


def scored(count: int, seed: int) -> list[dict[str, Any]]:
    firsts, seconds = sentences(count, seed), sentences(count, seed + 1)
    shared = [len(set(a.split()) & set(b.split())) / 8 for a, b in zip(firsts, seconds, strict=True)]
    return [{"text": a, "text_pair": b + " .", "label": label} for a, b, label in zip(firsts, seconds, shared, strict=True)]


def train(data: Path, evaluation: Path | None, model: Path, out: Path, reporter: Any = QUIET, **options: Any) -> Any:
    changes = {"epochs": 2, "batch_sequences": 11, "learning_rate": 1e-3, **options.pop("finetune", {})}
    return run("embedding", data, evaluation, model, out, reporter, finetune=changes, **options)


def write_roberta(folder: Path, architecture: str, **config: Any) -> Path:
    """A model of another kind than BERT, which sentence-transformers opens too."""
    write_encoder(folder, "roberta", architecture, **config)
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def test_both_engines_learn_the_same_in_any_micro_batches(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", exc_type=ImportError)
    model = without_dropout(write_bert(tmp_path / "m", layers=1), tmp_path)
    data = write_lines(tmp_path / "x.jsonl", pairs(29, 1))
    for engine, packs in (("pytorch", 1), ("tensorflow", 2)):
        train(data, None, model, tmp_path / engine, finetune={"engine": engine, "micro_batch_packs": packs})
    expected = losses_of(tmp_path / "pytorch")
    assert len(expected) == 6
    agree(losses_of(tmp_path / "tensorflow"), expected, 1e-5)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("bert", {"symmetric": True}),
        ("bert", {"loss": "cosine"}),
        ("roberta", {"dimensions": [7, 3]}),
        ("roberta", {"scored": 1}),
    ],
)
def test_a_folder_of_sentence_transformers(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="SENTENCE-TRANSFORMERS MISSING: install it --no-deps")
    model = write_bert(tmp_path / "m", layers=1) if kind == "bert" else write_roberta(tmp_path / "m", "AutoModelForMaskedLM")
    rows = scored if settings.pop("scored", 0) or "loss" in settings else pairs
    prompts = {"query_prompt": "the ", "document_prompt": "on "} if rows is pairs else {}
    files = write_lines(tmp_path / "x.jsonl", rows(41, 1)), write_lines(tmp_path / "y.jsonl", rows(17, 9))
    listener = Listener()
    result = train(*files, model, tmp_path / "out", listener, task_settings={**settings, **prompts}).content
    assert result.metrics.keys() == result.baseline.keys()
    assert result.best_metric == ("ndcg@10" if rows is pairs else "spearman")
    assert result.metrics[result.best_metric] >= result.baseline[result.best_metric]
    assert losses_of(tmp_path / "out")[-1] < losses_of(tmp_path / "out")[0]
    texts = sentences(9, 5)
    opened = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert opened.max_seq_length == 61
    data = write_lines(tmp_path / "t.jsonl", [{"text": text} for text in texts])
    for name in ("query", "document") if rows is pairs else (None,):
        theirs = opened.encode(texts, prompt_name=name)
        vectors, options = tmp_path / f"{name}.npy", EmbedOptions(prompt_name=name)
        embed(tmp_path / "out", str(data), str(vectors), options, TaskSettings(), reporter=QUIET)
        agree(np.load(vectors), theirs, 1e-5, scale=1.0)
    _, report = transformers.AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    # The folder may keep some of the values of a vector: then it is measured by these, and so is what becomes of it.
    config = json.loads((tmp_path / "out" / "config_sentence_transformers.json").read_text())
    kept = shutil.copytree(tmp_path / "out", tmp_path / "kept")
    (kept / "config_sentence_transformers.json").write_text(json.dumps({**config, "truncate_dim": 7}))
    train(*files, kept, tmp_path / "again", finetune={"epochs": 1}, task_settings=settings)
    assert library.SentenceTransformer(str(tmp_path / "again"), device="cpu").encode(texts).shape == (9, 7)
    again = train(*files, model, tmp_path / "out", task_settings={**settings, **prompts})
    assert (again.skipped, again.content) == (True, result)


@pytest.mark.parametrize(("stored", "length"), [(23, 23), (10**30, 64)])
def test_texts_are_cut_where_the_folder_cuts_them(stored: int, length: int, tmp_path: Path) -> None:
    """Unless the settings say otherwise; a number that stands for none means all positions."""
    model = write_bert(tmp_path / "m", layers=1, positions=64)
    (model / "modules.json").write_text(
        '[{"type": "sentence_transformers.Transformer"}, {"type": "sentence_transformers.Pooling", "path": "1_Pooling"}]'
    )
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    (model / "tokenizer_config.json").write_text(json.dumps({"model_max_length": stored}))
    rows = [{"anchor": f"cat {number}", "positive": "the hill " * 90 + str(number)} for number in range(3)]
    values = {
        "task": {"name": "embedding", "too_long": "truncate"},
        "finetune": {"epochs": 1, "batch_sequences": 3},
    }
    files, out = FineTuneFiles(write_lines(tmp_path / "x.jsonl", rows), None, model), tmp_path / "out"
    result = finetune(section_from_mapping(PipelineSettings, values, "test"), files, out, reporter=QUIET).content
    assert result.max_sequence_length == length
    assert json.loads((out / "sentence_bert_config.json").read_text())["max_seq_length"] == length
    assert json.loads((out / "1_Pooling" / "config.json").read_text())["pooling_mode_cls_token"] is True


@pytest.mark.parametrize(
    ("rows", "finetune", "settings", "message"),
    [
        (pairs(12, 1), {}, {"loss": "cosent"}, "task.loss = cosent: the loss requires pairs with a score"),
        (pairs(12, 1), {}, {"dimensions": [65]}, r"task.dimensions: 65 is larger than the size \d+ of the vectors"),
        (pairs(10, 1), {}, {}, "contains 10 rows, but an update needs finetune.batch_sequences = 11"),
        (
            [{"text": "cat", "text_pair": "dog", "label": 1.5}] * 12,
            {},
            {"loss": "cosine"},
            "must be between -1 and 1 .* is 1.5",
        ),
        ([*scored(3, 1), *pairs(2, 1)], {}, {}, "row 4\\): the row has an anchor and a positive"),
        (scored(3, 1), {"batch_sequences": 1}, {}, "batch_sequences = 1: an update must contain at least two pairs"),
        ([{**row, "label": 1} for row in scored(12, 1)], {}, {}, "every score is 1"),
        (scored(12, 1), {}, {"loss": "cosine", "scale": 3}, "task.scale = 3"),
        (pairs(12, 1), {"algorithm": "lpfhp"}, {}, "finetune.algorithm = lpfhp"),
    ],
)
def test_what_does_not_fit(rows: Any, finetune: Any, settings: Any, message: str, model: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "x.jsonl", rows)
    with pytest.raises(InputError, match=message):
        train(data, None, model, tmp_path / "out", finetune=finetune, task_settings=settings)


def test_an_update_of_one_pair_with_a_cosine_of_its_own(model: Path, tmp_path: Path) -> None:
    data, one = write_lines(tmp_path / "x.jsonl", scored(3, 1)), {"batch_sequences": 1, "epochs": 1}
    train(data, None, model, tmp_path / "out", finetune=one, task_settings={"loss": "cosine"})
    assert len(losses_of(tmp_path / "out")) == 3


def test_an_evaluation_file_of_another_kind(model: Path, tmp_path: Path) -> None:
    files = write_lines(tmp_path / "x.jsonl", pairs(12, 1)), write_lines(tmp_path / "y.jsonl", scored(5, 1))
    with pytest.raises(InputError, match=r"y.jsonl: line 1 .*x.jsonl has an anchor and a positive"):
        train(*files, model, tmp_path / "out")


def test_a_causal_model_needs_the_last_token(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=66)
    transformers.GPT2Model(config).save_pretrained(tmp_path / "m")
    TOKENIZER.save(str(tmp_path / "m" / "tokenizer.json"))
    data = write_lines(tmp_path / "x.jsonl", pairs(12, 1))
    with pytest.raises(InputError, match=r"so mean pooling would miss most of a text; set task.pooling to last"):
        train(data, None, tmp_path / "m", tmp_path / "out")
    train(data, None, tmp_path / "m", tmp_path / "out", task_settings={"pooling": "last"}, finetune={"epochs": 1})
    assert len(losses_of(tmp_path / "out")) == 2


# --- by two processes, killed and resumed

SHORT = {"epochs": 3, "batch_sequences": 11, "learning_rate": 1e-3, "engine": "pytorch", "save_every_updates": 2}


def test_two_processes_are_one_and_both_survive_a_stop(tmp_path: Path) -> None:
    """A run of one process ends in the same bits; one of two processes, which were killed, in those of one but for sums."""
    model = without_dropout(write_bert(tmp_path / "m", layers=1), tmp_path)
    files = write_lines(tmp_path / "x.jsonl", pairs(29, 1)), write_lines(tmp_path / "y.jsonl", pairs(9, 9))
    run("embedding", *files, model, tmp_path / "one", finetune=SHORT)
    with pytest.raises(StoppedError):
        run("embedding", *files, model, tmp_path / "stopped", StopAfter(3), finetune=SHORT)
    run("embedding", *files, model, tmp_path / "stopped", finetune=SHORT)
    for name in ("model.safetensors", "metrics.json", "best/baseline.json"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    words = ["finetune", "--task", "embedding", "--data", files[0], "--evaluation", files[1], "--model", model]
    section = {**SHORT, "max_sequence_length": 61, "log_every_updates": 1, "threads": 1}
    words += [f"--set=finetune.{name}={value}" for name, value in section.items()]
    words += ["--set=task.too_long=truncate", "--out", tmp_path / "two"]
    command = [*TORCHRUN, "-m", "gaudi_bert", *map(str, words)]
    kill_at(tmp_path / "two" / "checkpoints" / "update-00000002.safetensors", command)
    finished(command)
    agree(losses_of(tmp_path / "two"), losses_of(tmp_path / "one"), 1e-6)
    two, one = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    agree(two, one, 1e-5, scale=1.0)


# --- five updates of a packed run are those of sentence-transformers' loss on padded batches: losses and weights

ROWS, UPDATES = 7, 5
# A large epsilon: else the sign of a gradient that is zero but for rounding decides where a weight goes.
LOOP = {"learning_rate": 1e-3, "epsilon": 1e-3, "weight_decay": 0.0, "clip_norm": 0.0}
NEGATIVES = [
    {"anchor": text, "positive": f"{other} . north", "negative": negative}
    for text, other, negative in zip(*(sentences(ROWS, seed) for seed in (3, 8, 4)), strict=True)
]


def test_five_updates_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    """By in-batch negatives; what the other losses and all gradients are is in `test_contrast.py`, to the last digits."""
    library = pytest.importorskip("sentence_transformers", reason="SENTENCE-TRANSFORMERS MISSING: install it --no-deps")
    from sentence_transformers.sentence_transformer import losses

    model = write_roberta(tmp_path / "m", "AutoModel", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    data = write_lines(tmp_path / "x.jsonl", NEGATIVES)
    changes = {**LOOP, "epochs": UPDATES, "batch_sequences": ROWS, "warmup_share": 0.0, "micro_batch_packs": 2}
    run("embedding", data, None, model, tmp_path / "out", finetune={**changes, "engine": "pytorch"})
    opened = library.SentenceTransformer(str(model), device="cpu")
    loss = losses.MultipleNegativesRankingLoss(opened).train()
    optimizer = torch.optim.AdamW(opened.parameters(), eps=LOOP["epsilon"], weight_decay=0.0)
    settings = TrainingSettings(learning_rate=LOOP["learning_rate"], updates=UPDATES, warmup_updates=0)
    columns, expected = [[row[name] for row in NEGATIVES] for name in NEGATIVES[0]], []
    for update in range(1, UPDATES + 1):
        optimizer.param_groups[0]["lr"] = compute_learning_rate(update, settings)
        value = loss([opened.preprocess(column) for column in columns], None)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        expected.append(float(value.detach()))
    agree(losses_of(tmp_path / "out"), expected, 1e-5)
    ours = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    right = {name: value.detach().numpy() for name, value in opened.named_parameters()}
    agree({name: value.detach().numpy() for name, value in ours.named_parameters()}, right, 1e-5, scale=1.0)
