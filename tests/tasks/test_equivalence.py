"""Packed is alone, for every task, by either engine: logits, loss and gradients of transformers' own `BertFor...`, one
sequence at a time.

The weights are seeded noise; that of the head is of the size that BERT's heads start with, so that logits are of ordinary
size (below 1) and 1e-5 is a bound for float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.common.arrays import NOT_PREDICTED
from gaudi_bert.common.sampling import SampledPacks
from gaudi_bert.config.sections import TASK_NAMES, TaskSettings
from gaudi_bert.config.values import EngineName
from gaudi_bert.engines import load_engine
from gaudi_bert.engines.protocol import Model, ModelSpec
from gaudi_bert.model.config import BertConfig
from gaudi_bert.rows.packs import BatchShape, PackedSequences
from gaudi_bert.rows.types import NO_WORD, Sequences
from gaudi_bert.tasks.task import MaskKey, Task, Vocabulary, import_task_class
from gaudi_bert.training.weights import convert_to_hugging_face
from tests.builders.agree import agree, identical
from tests.builders.effort import LONG
from tests.builders.model_packs import BY_EACH_ENGINE

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LENGTHS = (5, 13, 3, 7, 4, 11, 3, 3, 6, 9, 5, 4, 3, 8)
LENGTH = 61
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = BertConfig(
    vocab_size=53,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=67,
    **NO_DROPOUT,
)
# Losses of rows together are in tests/tasks/test_contrast.py.
NAMES = [name for name in TASK_NAMES if name != "embedding"]
LABELS = ("O", "B-person", "I-person")
DEPTHS = (1, 2, 3, 5, 8, 12) if LONG else (12,)


def make_task(name: str) -> Task:
    labels = LABELS if name in ("classification", "multi-label", "token-classification") else ()
    return import_task_class(name)(TaskSettings(name=name), labels, Vocabulary(SMALL.vocab_size, (0, 1, 2, 3), 4))


def make_sequences(task: Task) -> Sequences:
    random = np.random.default_rng(7)
    count, tokens = len(LENGTHS), sum(LENGTHS)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    ids = random.integers(5, SMALL.vocab_size, tokens).astype(np.int32)
    ids[offsets[:-1]], ids[offsets[1:] - 1] = 2, 3
    segments = np.concatenate([np.arange(length) > length // 2 for length in LENGTHS]).astype(np.int8)
    words = np.full(tokens, NO_WORD, np.int32)
    words[offsets[:-1] + 1] = 0
    target: Any = {
        "classification": random.integers(0, 3, count).astype(np.int32),
        "multi-label": random.integers(0, 2, (count, 3)).astype(np.float32),
        "regression": random.normal(size=count).astype(np.float32),
        "reranking": random.uniform(size=count).astype(np.float32),
        "token-classification": np.where(words == 0, random.integers(0, 3, tokens), NOT_PREDICTED).astype(np.int32),
        "question-answering": np.array([[n // 3, n - 2] for n in LENGTHS], np.int32),
    }.get(task.name)
    tagged = task.name == "token-classification"
    return Sequences(np.arange(count), offsets, ids, segments, words=words if tagged else None, target=target)


def weighted_model(engine: EngineName, task: Task) -> Model:
    """A model of noise of a size that makes outputs differ."""
    random = np.random.default_rng(3)
    config = dataclasses.replace(SMALL, attention="causal" if task.head.is_causal else "bidirectional")
    model = load_engine(engine).build_model(ModelSpec(config, task.head), seed=None)
    for name, shape in model.variable_shapes().items():
        noise = random.normal(0, 0.2 if name.startswith("bert/") else SMALL.initializer_range, shape)
        model.load_variables({name: (noise + float(name.endswith("gamma"))).astype(np.float32)})
    return model


def alone(
    config: BertConfig, task: Task, values: dict, sequences: Sequences, packs: SampledPacks
) -> tuple[list[np.ndarray], float, dict[str, np.ndarray]]:
    """Every sequence by itself through the class of the same architecture: logits, the loss of all, and its gradients."""
    content = {**config.to_json(), **task.make_config_json(), "attn_implementation": "eager"}
    if task.name == "reranking":  # binary cross-entropy is what transformers has for several labels
        content["problem_type"] = "multi_label_classification"
    model = getattr(transformers, task.architecture)(transformers.BertConfig(**content))
    state = {name: torch.tensor(value) for name, value in convert_to_hugging_face(values).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert all(name.startswith("cls.predictions.decoder") or "position_ids" in name for name in missing)
    assert not unexpected
    model.tie_weights()
    model.eval()
    logits, total, weight = [], torch.zeros(()), 0.0
    shape = BatchShape(len(packs), LENGTH, len(LENGTHS))
    batch = PackedSequences(sequences, packs).build_batch(np.arange(len(packs)), shape)
    features = task.make_targets_and_weights(batch, MaskKey(5, 0))
    for number in range(len(sequences)):
        span = slice(*sequences.offsets[number : number + 2])
        inputs, targets, count = task_inputs(task, sequences, number, span, batch, features)
        outputs = model(
            input_ids=torch.tensor(inputs[None].astype(np.int64)),
            token_type_ids=torch.tensor(sequences.segment_ids[span][None].astype(np.int64)),
            attention_mask=torch.ones((1, len(inputs)), dtype=torch.int64),
            **{name: torch.tensor(value) for name, value in targets.items()},
        )
        if task.name == "question-answering":
            logits.append(torch.stack([outputs.start_logits[0], outputs.end_logits[0]], dim=-1).detach().numpy())
        else:
            logits.append(outputs.logits[0].detach().numpy())
        if count:
            total, weight = total + outputs.loss * count, weight + count
    (total / weight).backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return logits, float((total / weight).detach()), gradients


def task_inputs(task, sequences, number, span, batch, features) -> tuple[np.ndarray, dict[str, np.ndarray], int]:
    """Token numbers, targets as transformers takes them, and how many terms its mean is over."""
    ids, target = sequences.input_ids[span], sequences.target
    if task.name in ("classification", "multi-label", "regression", "reranking"):
        labels = target[number : number + 1]
        labels = labels.astype(np.int64) if task.name == "classification" else labels
        return ids, {"labels": labels[:, np.newaxis] if task.name == "reranking" else labels}, 1
    if task.name == "token-classification":
        return ids, {"labels": target[span][None].astype(np.int64)}, int((target[span] != NOT_PREDICTED).sum())
    if task.name == "question-answering":
        first, last = target[number].astype(np.int64)
        return ids, {"start_positions": np.array([first]), "end_positions": np.array([last])}, 1
    if task.name == "causal-language-modelling":
        return ids, {"labels": ids[None].astype(np.int64)}, len(ids) - 1
    here = int(np.flatnonzero(batch.members == number)[0])
    pack, start = batch.packs[here], batch.starts[here]
    masked = features["input_ids"][pack, start : start + len(ids)]
    labels = np.full(len(ids), -100, np.int64)
    for position, right, used in zip(
        *(features[n][pack] for n in ("masked_positions", "targets", "target_weights")), strict=True
    ):
        if used and start <= position < start + len(ids):
            labels[position - start] = right
    return masked, {"labels": labels[None]}, int((labels != -100).sum())


def packed_in(depth: int) -> SampledPacks:
    """Sequences one after the other into packs of at most `depth`, in a shuffled order."""
    order, starts, room, held = np.random.default_rng(depth).permutation(len(LENGTHS)), [0], LENGTH, 0
    for place, number in enumerate(order):
        if held == depth or LENGTHS[number] > room:
            starts.append(place)
            room, held = LENGTH, 0
        room, held = room - LENGTHS[number], held + 1
    return SampledPacks(order, np.array([*starts, len(order)]))


def gradients_of(model: Any, batch: dict[str, np.ndarray], weight: float) -> dict[str, np.ndarray]:
    """Those of the mean loss, as each framework takes them."""
    factors = np.array([1 / weight, 0.0], np.float32)
    if not hasattr(model, "parameters_by_name"):
        tensors = {name: tf.constant(value) for name, value in batch.items()}
        with tf.GradientTape() as tape:
            loss, _ = model.compute_loss(tensors, None, tf.constant(factors))
        found = tape.gradient(loss, model.variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return {name: tf.convert_to_tensor(gradient).numpy() for name, gradient in found.items()}
    loss, _ = model.compute_loss(model.copy_to_device(batch), np.zeros(2, np.int32), torch.tensor(factors))
    leaves = model.parameters_by_name
    found = torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True, allow_unused=True)
    return {name: gradient.numpy() for name, gradient in zip(leaves, found, strict=True)}


@BY_EACH_ENGINE
@pytest.mark.repeated
@pytest.mark.parametrize("name", NAMES)
def test_packed_is_alone(name: str, engine: EngineName) -> None:
    task = make_task(name)
    sequences = make_sequences(task)
    model = weighted_model(engine, task)
    logits_alone, loss, gradients = alone(model.spec.config, task, model.copy_variables(), sequences, packed_in(1))
    norm = np.sqrt(sum(float(np.sum(np.square(value, dtype=np.float64))) for value in gradients.values()))
    for depth in DEPTHS:
        packs = packed_in(depth)
        batch = PackedSequences(sequences, packs).build_batch(
            np.arange(len(packs)), BatchShape(len(packs) + 1, LENGTH, depth)
        )
        features = {**batch.features(), **task.make_targets_and_weights(batch, MaskKey(5, 0))}
        logits, (loss_sum, weight, _) = model.evaluate_batch(features)
        assert abs(loss_sum / weight - loss) <= 1e-5
        assert (logits is None) == (not task.head.metrics_need_outputs)
        if logits is not None:
            kept = len(sequences.input_ids) if task.head.predicts_per_token else len(sequences)
            ours = np.full((kept, task.output_width), np.nan, np.float32)
            batch.scatter_outputs(logits, ours, per_token=task.head.predicts_per_token)
            right = np.concatenate([each.reshape(-1, task.output_width) for each in logits_alone])
            agree(ours, right, 1e-5, scale=1.0)
            identical(model.compute_outputs(features), logits)
        for key, ours in convert_to_hugging_face(gradients_of(model, features, float(weight))).items():
            right = gradients.get(key, np.zeros_like(ours))
            apart = np.linalg.norm((ours - right).astype(np.float64))
            assert apart <= max(1e-5 * np.linalg.norm(right.astype(np.float64)), 1e-7 * norm), (depth, key)
