"""The step of pretraining and of every task is fit for Gaudi, in both engines, with the settings that are shipped."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from gaudi_bert.config.pipeline import PipelineSettings, section_from_mapping
from gaudi_bert.config.sections import TASK_NAMES, TrainingSettings
from gaudi_bert.engines import load_engine
from gaudi_bert.engines.protocol import Communicator, ModelSpec
from gaudi_bert.model.heads import PretrainingHead
from gaudi_bert.runs.finetune import create_job
from gaudi_bert.runs.labelled_data import FineTuneFiles
from gaudi_bert.training.batches import TrainingOrder
from gaudi_bert.training.objective import Objective, PretrainingObjective, TrainingStep
from gaudi_bert.training.verify_model import collate_packs
from tests.builders.gaudi_graphs import operations_of, pytorch_problems, tensorflow_problems, traced_pass
from tests.builders.model_packs import WITHOUT_PYTORCH, random_packs, small_config
from tests.builders.reporters import QUIET
from tests.tasks.conftest import ONE_ANSWER

SMALL_BATCH = collate_packs(random_packs(7, [[11, 5, 13], [17, 9], [31]]), 37, 17, 3)


def problems(engine: str, spec: ModelSpec, batches: list[Any], settings: Any, objective: Objective) -> set[tuple[str, str]]:
    """Of an update of these micro-batches."""
    model = load_engine(engine).build_model(spec, seed=None)
    update_loss = objective.make_update_loss(batches, 1, Communicator())
    if engine == "pytorch":
        return pytorch_problems(traced_pass(model, batches[0], update_loss))
    return tensorflow_problems(graphs_of(model, batches, settings, objective))


def graphs_of(model: Any, batches: list[Any], settings: Any, objective: Objective) -> list[tf.Graph]:
    updates = load_engine("tensorflow").create_updates(model, settings, Communicator(), len(batches))
    TrainingStep(updates, Communicator(), settings, objective).run_update(batches, 1, 1e-3)
    return updates.graphs


def problems_of_job(engine: str, task: dict[str, Any], data: Path, model: Path) -> set[tuple[str, str]]:
    """Of the first update of a fine-tuning."""
    section = {"max_sequence_length": 61, "batch_sequences": 12, "micro_batch_packs": 4, "engine": engine}
    settings = section_from_mapping(PipelineSettings, {"task": task, "finetune": section}, "test")
    job = create_job(settings, FineTuneFiles(data, None, model), Path(), QUIET)
    updates = job.plan_weight_updates(1, 1)
    batches = list(islice(updates.make_batches(TrainingOrder(1, True)), updates.plan.accumulation_steps))
    return problems(engine, job.spec, batches, updates.plan.settings, updates.objective)


@WITHOUT_PYTORCH
@pytest.mark.parametrize("engine", ["tensorflow", "pytorch"])
@pytest.mark.parametrize("kind", [*TASK_NAMES, "listwise"])
def test_the_step_of_every_task(kind: str, engine: str, files: Any, model: Path) -> None:
    task = {"name": kind, "too_long": "truncate", **({} if kind in (*ONE_ANSWER, "listwise") else {"stride": 4})}
    if kind == "listwise":
        task |= {"name": "reranking", "loss": "listwise"}
    assert problems_of_job(engine, task, files[task["name"]][0], model) == set()


@pytest.mark.parametrize("engine", ["tensorflow", pytest.param("pytorch", marks=WITHOUT_PYTORCH)])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_the_step_of_pretraining(engine: str, optimizer: str) -> None:
    spec, settings = ModelSpec(small_config(), PretrainingHead()), TrainingSettings(optimizer=optimizer)
    assert problems(engine, spec, [SMALL_BATCH], settings, PretrainingObjective()) == set()


@WITHOUT_PYTORCH
@pytest.mark.parametrize("name", ["modernbert", "roberta"])
def test_the_step_of_any_encoder(name: str, tmp_path: Path, files: Any) -> None:
    from tests.builders.encoders import write_encoder

    write_encoder(tmp_path / name, name, "AutoModel")
    data = files["classification"][0]
    assert problems_of_job("pytorch", {"name": "classification"}, data, tmp_path / name) == set()


def test_what_gaudi_converts_to_bfloat16_is_there_and_is_none_of_what_must_stay() -> None:
    from gaudi_bert.engines.tensorflow.engine import BFLOAT16_LIST

    lists = SimpleNamespace(**json.loads(BFLOAT16_LIST.read_text(encoding="utf-8")))
    model = load_engine("tensorflow").build_model(ModelSpec(small_config(), PretrainingHead("sequence")), seed=None)
    settings = TrainingSettings(optimizer="lamb", loss="sequence")
    (graph,) = graphs_of(model, [SMALL_BATCH], settings, PretrainingObjective("sequence"))
    operations = list(operations_of(graph))
    converted = {*lists.allowlist, *lists.strict_conditional_list}
    assert converted <= {operation.type for operation in operations}
    kinds = "Softmax Sum Mean Log Exp Erf Rsqrt Sqrt Mul AddV2 Sub BiasAddGrad"
    assert not converted & set(kinds.split())
    kept = [operation for operation in operations if "KEEP_FP32_PRECISION" in operation.name and operation.type == "MatMul"]
    assert len(kept) == 3  # the next-sentence product and its two gradients


# --- every planted fault is found, wherever it hides


def test_planted_faults_of_tensorflow() -> None:
    @tf.function(autograph=False)
    def wrong(numbers: tf.Tensor) -> tf.Tensor:
        passed = tf.py_function(lambda each: each, [numbers], tf.float32)
        return tf.size(tf.unique(tf.cast(passed, tf.float64) * 2)[0])

    def hidden(numbers: tf.Tensor) -> tf.Tensor:
        return tf.cond(numbers[0] > 0, lambda: wrong(numbers), lambda: tf.constant(1))

    with tf.Graph().as_default():
        graph = tf.function(hidden, autograph=False).get_concrete_function(tf.TensorSpec([4], tf.float32)).graph
    assert tensorflow_problems([graph]) >= {
        ("dynamic shape", "Unique"),
        ("double precision", "Cast"),
        ("host call", "EagerPyFunc"),
    }


@WITHOUT_PYTORCH
def test_planted_faults_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from gaudi_bert.engines.pytorch import model

    right = getattr(model, name := "compute_pretraining_loss_and_metric_sums")
    monkeypatch.setattr(model, name, lambda words, *others: right(words.double(), *others).float())
    spec = ModelSpec(small_config(), PretrainingHead())
    found = problems("pytorch", spec, [SMALL_BATCH], TrainingSettings(), PretrainingObjective())
    assert {kind for kind, _ in found} == {"double precision"}
    with FakeTensorMode(shape_env=ShapeEnv()):
        graph = make_fx(lambda numbers: numbers.nonzero() * 2)(torch.empty(4))
    assert {kind for kind, _ in pytorch_problems(graph)} == {"data-dependent shape", "dynamic shape"}
