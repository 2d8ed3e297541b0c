"""`doctor --graph`: sizes from the data or from the settings, lines for people, an exit code for scripts."""

from __future__ import annotations

import json
from dataclasses import replace

import tensorflow as tf

from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.engines.graph_report import CardFit, GraphProblem, GraphReport
from gaudi_bert.engines.tensorflow import bert
from gaudi_bert.model.features import BatchSizes
from gaudi_bert.training.check_graph import describe_graph
from gaudi_bert.training.results import GraphResult
from tests.builders import training_data as data
from tests.builders.command_line import Done, run_command

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
