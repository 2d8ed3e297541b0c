"""`doctor --graph`: the step of pretraining and of each task; sizes, lines for people, an exit code for scripts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import load_pipeline, pipeline_from_mapping
from gaudi_bert.config.sections import TASK_NAMES
from gaudi_bert.engines.graph_report import CardFit, GraphProblem, GraphReport
from gaudi_bert.engines.tensorflow import bert
from gaudi_bert.model.features import BatchSizes
from gaudi_bert.tasks.check_graph import GraphResult, check_graph, describe_graph
from tests.builders import training_data as data
from tests.builders.bert_folder import CONFIG, NOUNS
from tests.builders.command_line import Done, run_command
from tests.builders.effort import sampled
from tests.builders.model_packs import WITHOUT_PYTORCH

KINDS = [*TASK_NAMES, "listwise"]


def checked(kind: str, engine: str, model: Path, folder: Path, **finetune: Any) -> GraphResult:
    task = {"name": kind, "too_long": "truncate", "stride": 4}
    if kind == "listwise":
        task |= {"name": "reranking", "loss": "listwise"}
    if kind == "multi-label":  # the others have two labels
        (folder / "labels.txt").write_text("\n".join(NOUNS))
        task["labels"] = "labels.txt"
    chosen = {"max_sequence_length": 61, "depth": 5, "init_checkpoint": str(model), "engine": engine, **finetune}
    settings = pipeline_from_mapping({"task": task, "finetune": chosen}, "test")
    return check_graph(settings, folder / "none", folder)


@WITHOUT_PYTORCH
@pytest.mark.parametrize("kind", sampled(KINDS, 2))
def test_the_step_of_a_task_is_that_of_its_run(kind: str, files: Any, model: Path, tmp_path: Path) -> None:
    """Traced for batches of real rows, and for those that its settings make up, of the same shape."""
    rows = files["reranking" if kind == "listwise" else kind][0]
    by_rows = checked(kind, "pytorch", model, tmp_path, data=str(rows), batch_sequences=12)
    packs, length, _, depth = by_rows.sizes
    assert by_rows.sizes_from == str(rows)
    shape = {"max_sequence_length": length, "depth": depth, "micro_batch_packs": packs, "batch_sequences": 6 * packs}
    by_settings = checked(kind, "pytorch", model, tmp_path, **shape)
    one, other = by_rows.report, by_settings.report
    assert by_settings.sizes == by_rows.sizes
    assert replace(other, flops_per_update=0) == replace(one, flops_per_update=0)
    assert one.is_fit
    # All micro-batches but one are computed forward once more; a backward pass has twice the products, a mean has one.
    twice, mean = (11 if kind in ("embedding", "listwise") else 0), flops_of_mean(kind, by_rows.sizes)
    assert by_settings.accumulation_steps == (12 if twice else 6)
    once_more = (other.flops_per_micro_batch + mean) // 3 * twice
    assert other.flops_per_update == by_settings.accumulation_steps * other.flops_per_micro_batch + once_more


def flops_of_mean(kind: str, sizes: BatchSizes) -> int:
    """Of the vectors of all tokens to those of texts, where a task has them."""
    packs, length, _, depth = sizes
    return 2 * packs * length * depth * CONFIG["hidden_size"] * (kind == "embedding")


@WITHOUT_PYTORCH
@pytest.mark.parametrize("kind", sampled(KINDS, 5, first=3))
def test_both_engines_count_the_same(kind: str, model: Path, tmp_path: Path) -> None:
    """But for token types, which TensorFlow looks up by a product; a mean has a gradient there that nobody reads."""
    ours, theirs = (checked(kind, engine, model, tmp_path) for engine in ("tensorflow", "pytorch"))
    assert ours.report.problems == ()
    assert (ours.sizes, ours.report.parameters) == (theirs.sizes, theirs.report.parameters)
    packs, length, _, _ = ours.sizes
    token_types = 2 * 2 * packs * length * CONFIG["type_vocab_size"] * CONFIG["hidden_size"]
    more = ours.report.flops_per_micro_batch - theirs.report.flops_per_micro_batch
    assert more == token_types + flops_of_mean(kind, ours.sizes)
    assert 0.5 < ours.report.activation_bytes / theirs.report.activation_bytes < 2
    assert 0.5 < ours.report.peak_bytes / theirs.report.peak_bytes < 2


@WITHOUT_PYTORCH
@pytest.mark.parametrize(("name", "kind"), sampled([("modernbert", "embedding"), ("roberta", "token-classification")], 2))
def test_any_encoder(name: str, kind: str, tmp_path: Path) -> None:
    """By PyTorch alone; layers that are computed twice keep less."""
    pytest.importorskip("transformers", exc_type=ImportError)
    from tests.builders.encoders import SIZES, write_encoder

    write_encoder(tmp_path / name, name, "AutoModel")
    once, twice = (checked(kind, "auto", tmp_path / name, tmp_path, recompute=recompute) for recompute in (False, True))
    assert once.report.problems == twice.report.problems == ()
    assert (once.engine, once.vocabulary) == ("pytorch", SIZES["vocab_size"])
    kept = [result.report.activation_bytes for result in (once, twice)]
    assert kept[1] < 0.7 * kept[0], kept
    assert twice.report.flops_per_micro_batch > 1.2 * once.report.flops_per_micro_batch
    with pytest.raises(InputError, match="TensorFlow runs BERT only here; set it to pytorch"):
        checked(kind, "tensorflow", tmp_path / name, tmp_path)


@WITHOUT_PYTORCH
@pytest.mark.parametrize(
    ("stages", "options", "checked"),
    [
        ("", (), ""),
        ("task: {name: reranking}", (), "reranking"),
        ("task: {name: reranking}\nfinetune: {data: x.jsonl}", (), ""),
        ("task: {name: reranking}\nfinetune: {data: x.jsonl}", ("--task", "embedding"), "embedding"),
    ],
)
def test_which_step_is_checked(stages: str, options: tuple[str, ...], checked: str, tmp_path: Path) -> None:
    """That of a task where it alone is named, or on request."""
    (tmp_path / "pipeline.yaml").write_text(f"name: small\n{stages}\n")
    chosen = [*SMALL, "training.engine=pytorch", "finetune.engine=pytorch"]
    overrides = [part for each in chosen for part in ("--set", each)]
    done = run_command("doctor", "--graph", "pipeline.yaml", *overrides, *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"small{checked and f', {checked}'}: micro-batches of ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--graph", "x.yaml", "--task", "rerank"), "--task rerank"),
        (("--task", "reranking"), "--task: for --graph PIPELINE, whose step it selects"),
        (("--graph", "x.yaml", "--task", "reranking", "--set", "finetune.max_sequence_length=512"), "the model has 128 pos"),
        (("--graph", "x.yaml", "--task", "reranking", "--set", "finetune.init_checkpoint=no"), "no"),
    ],
)
def test_what_is_refused(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("name: small\n")
    done = run_command("doctor", *options, folder=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert message in done.stderr


# --- what is printed


SMALL = ["model.num_hidden_layers=1", "model.hidden_size=8", "model.intermediate_size=6", "training.micro_batch_packs=2"]


def test_what_does_not_fit_is_shown_and_too_much_is_cut_short() -> None:
    report = GraphReport(
        problems=(GraphProblem(kind="string", graph="update", operation="a", type="AsString", found="a:0 is a string"),)
        * 25,
        **dict.fromkeys(
            [
                *("operations", "flops_per_micro_batch", "flops_per_update", "parameters", "parameter_bytes"),
                *("optimizer_bytes", "gradient_bytes", "activation_bytes", "peak_bytes"),
            ],
            1,
        ),
        cards=(CardFit("Gaudi", 0), CardFit("Gaudi2", 8)),
    )
    result = GraphResult("demo", "tensorflow", "x", BatchSizes(9, 1, 1, 1), 1, "float32", 1, report)
    lines = describe_graph(result)
    assert lines[-1] == "not fit for Gaudi"
    assert lines[-2] == "... and 5 more"
    assert lines[-3].endswith("string: AsString a in update: a:0 is a string")
    assert "Gaudi: not even one pack fits" in lines
    assert "Gaudi2: up to about 8 packs per micro-batch; 9 does not fit" in lines
    good = replace(result, sizes=BatchSizes(8, 1, 1, 1), report=replace(report, problems=()))
    lines = describe_graph(good)
    assert lines[-1].startswith("fit for Gaudi")
    assert "Gaudi2: up to about 8 packs per micro-batch; 8 fits" in lines


@pytest.mark.slow
def test_before_packing_the_settings_give_the_sizes_and_an_impossible_model_is_refused(tmp_path) -> None:
    (tmp_path / "pipeline.yaml").write_text("name: small\n")

    def doctor(*more: str) -> Done:
        overrides = [part for each in SMALL for part in ("--set", each)]
        return run_command("doctor", "--graph", "pipeline.yaml", *overrides, *more, folder=tmp_path)

    done = doctor("--json", "--set", "packing.depth=5", "--set", "training.global_batch_sequences=10")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["sizes"] == {"packs": 2, "positions": 128, "masked_slots": 25, "depth": 5, "vocabulary": 8192}
    assert (printed["fit"], printed["accumulation_steps"], printed["problems"]) == (True, 5, [])
    assert {"cards", "peak_bytes", "sizes_from"} <= printed.keys()
    refused = doctor("--set", "model.max_position_embeddings=64")
    assert refused.returncode == 2
    assert "the model's max_position_embeddings is 64" in refused.stderr
    too_many = doctor("--set", "training.micro_batch_packs=20000")
    assert too_many.returncode == 2
    assert "at most 2,147,483,647 can be numbered by int32; make micro-batches smaller" in too_many.stderr


@pytest.mark.slow
def test_after_packing_the_metadata_gives_them_and_a_graph_that_is_not_fit_is_exit_code_1(monkeypatch, tmp_path) -> None:
    """A model that calls back to Python in its forward pass, from the command line."""
    encode_packs = bert.encode_packs

    def talkative(*inputs):
        hidden_RH = encode_packs(*inputs)
        heard_RH = tf.numpy_function(lambda hidden: hidden, [hidden_RH], tf.float32)
        return tf.ensure_shape(heard_RH, hidden_RH.shape)

    monkeypatch.setattr(bert, "encode_packs", talkative)
    (tmp_path / "pipeline.yaml").write_text("name: small\n")
    chosen = [*SMALL, "training.global_batch_sequences=8"]
    settings = load_pipeline(tmp_path / "pipeline.yaml", chosen)
    packed = WorkFolder.of(settings, tmp_path / "work", tmp_path).split("train").packed
    data.write_packed(packed, data.make_packs(8))
    overrides = [part for each in chosen for part in ("--set", each)]
    done = run_command("doctor", "--graph", "pipeline.yaml", "--work", tmp_path / "work", *overrides, folder=tmp_path)
    assert done.returncode == 1
    sizes = f"2 packs x {data.LENGTH} positions, {data.MASKED_SLOTS} masked slots, depth 3, vocabulary {data.VOCABULARY}"
    assert done.stdout.startswith(f"small: micro-batches of {sizes} (from {packed})")
    assert "(2 micro-batches per card)" in done.stdout
    assert "host call: PyFunc" in done.stdout
    assert done.stdout.endswith("not fit for Gaudi\n")
    assert done.stderr.splitlines()[-1].endswith("not fit for Gaudi: 4 problems, the first: PyFunc, host call")
