"""`doctor --graph`: sizes from the data or from the settings, lines for people, an exit code for scripts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tensorflow as tf

from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.cli.results import to_json
from gaudi_bert.config import load_pipeline
from gaudi_bert.stages.training.check_graph import check_graph, describe_graph
from gaudi_bert.stages.training.model_results import GraphResult, GraphSizes
from gaudi_bert.training.graph.check import GraphProblem
from gaudi_bert.training.graph.report import CardFit, GraphReport
from tests.builders import training_data

SMALL = ["model.num_hidden_layers=1", "model.hidden_size=8", "model.intermediate_size=6", "training.micro_batch_packs=2"]


def test_before_packing_the_settings_give_the_sizes(tmp_path) -> None:
    settings = load_pipeline(None, [*SMALL, "packing.depth=5", "training.global_batch_sequences=10"])
    result = check_graph(settings, WorkFolder.of(settings, tmp_path, tmp_path))
    assert result.sizes == GraphSizes(packs=2, positions=128, masked_slots=25, depth=5, vocabulary=8192)
    assert (result.report.is_fit, result.accumulation_steps) == (True, 5)
    printed = to_json(result)
    assert json.loads(json.dumps(printed)) == printed
    assert printed["fit"] is True
    assert {"sizes", "problems", "cards", "peak_bytes", "sizes_from"} <= printed.keys()
    lines = describe_graph(result)
    assert lines[-1].startswith("fit for Gaudi")
    assert any(line.startswith("Gaudi2: up to about ") and line.endswith("2 fits") for line in lines)


def test_after_packing_the_metadata_gives_them(tmp_path) -> None:
    settings = load_pipeline(None, [*SMALL, "training.global_batch_sequences=8"])
    folder = WorkFolder.of(settings, tmp_path, tmp_path)
    training_data.write_packed(folder.split("train").packed, training_data.make_packs(8))
    result = check_graph(settings, folder)
    assert result.sizes == GraphSizes(
        packs=2,
        positions=training_data.LENGTH,
        masked_slots=training_data.MASKED_SLOTS,
        depth=training_data.DEPTH,
        vocabulary=training_data.VOCABULARY,
    )
    assert result.accumulation_steps == 2


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
    result = GraphResult("demo", "x", GraphSizes(9, 1, 1, 1, 1), "float32", 1, report)
    lines = describe_graph(result)
    assert lines[-1] == "not fit for Gaudi"
    assert lines[-2] == "... and 5 more"
    assert lines[-3] == "mend     string: AsString a in update: a:0 is a string"
    assert "Gaudi: not even one pack fits" in lines
    assert "Gaudi2: up to about 8 packs per micro-batch; 9 does not fit" in lines


def test_the_command_prints_json_and_refuses_an_impossible_model(tmp_path) -> None:
    def doctor(*more: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "pipeline.yaml"
        path.write_text("name: small\n")
        overrides = [part for each in SMALL for part in ("--set", each)]
        command = [sys.executable, "-m", "gaudi_bert", "doctor", "--graph", str(path), *overrides, *more]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    done = doctor("--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fit"] is True
    refused = doctor("--set", "model.max_position_embeddings=64")
    assert refused.returncode == 2
    assert "the model's max_position_embeddings is 64" in refused.stderr
    too_many = doctor("--set", "training.micro_batch_packs=20000")
    assert too_many.returncode == 2
    assert "at most 2,147,483,647 can be numbered by int32; make micro-batches smaller" in too_many.stderr


def test_a_graph_that_is_not_fit_is_exit_code_1(monkeypatch, tmp_path, capsys) -> None:
    """A model that calls back to Python in its forward pass, from the command line."""
    from gaudi_bert.cli import main
    from gaudi_bert.model import bert

    encode = bert.encode

    def talkative(hidden_TH, *others):
        heard_TH = tf.numpy_function(lambda hidden: hidden, [hidden_TH], tf.float32)
        return encode(tf.ensure_shape(heard_TH, hidden_TH.shape), *others)

    monkeypatch.setattr(bert, "encode", talkative)
    (tmp_path / "pipeline.yaml").write_text("name: small\n")
    overrides = [part for each in SMALL for part in ("--set", each)]
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--graph", str(tmp_path / "pipeline.yaml"), "--work", str(tmp_path), *overrides])
    assert left.value.code == 1
    said = capsys.readouterr()
    assert "mend     host call: PyFunc" in said.out
    assert said.out.endswith("not fit for Gaudi\n")
    assert said.err.splitlines()[-1].endswith("not fit for Gaudi: 4 problems, the first: PyFunc, host call")
