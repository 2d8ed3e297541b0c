"""Five updates of a tiny model on given packs, shared out over processes and micro-batches in any way."""

from __future__ import annotations

import numpy as np

from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.config.values import EngineName
from gaudi_bert.engines import load_engine
from gaudi_bert.engines.protocol import Communicator, Model, ModelSpec
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import PretrainingHead
from gaudi_bert.training.objective import GLOBAL, LossDenominators, PretrainingObjective, TrainingStep
from gaudi_bert.training.verify_model import collate_packs
from tests.builders import training_data as data

UPDATES = 5
PACKS_PER_UPDATE = 12
EXPECTED = (2.5, 2.0)  # masked tokens and sequences per pack, as `balanced` is told


def packs_of(update: int) -> list:
    return data.make_packs(PACKS_PER_UPDATE, seed=100 + update)


def packed(packs: list) -> dict[str, np.ndarray]:
    batch = collate_packs(packs, data.LENGTH, data.MASKED_SLOTS, data.DEPTH)
    return {name: np.asarray(values) for name, values in batch.items()}


def make_model(dropout: float = 0.0, loss: str = "token", engine: EngineName = "tensorflow") -> Model:
    config = BertConfig(
        **data.MODEL,
        vocab_size=data.VOCABULARY,
        max_position_embeddings=data.LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.2,
    )
    return load_engine(engine).build_model(ModelSpec(config, PretrainingHead(loss)), seed=5)


def make_step(
    model: Model,
    settings: TrainingSettings,
    communicator: Communicator,
    micro_batches: int,
    *,
    denominators: LossDenominators = GLOBAL,
    engine: EngineName = "tensorflow",
) -> TrainingStep:
    updates = load_engine(engine).create_updates(model, settings, communicator, micro_batches)
    return TrainingStep(updates, communicator, settings, PretrainingObjective(settings.loss), denominators)


def run_updates(
    communicator: Communicator,
    micro_batches: int,
    *,
    kind: str = "global",
    optimizer: str = "adamw",
    loss: str = "token",
) -> dict[str, np.ndarray]:
    """The parameters after all updates; every process takes its share of the packs."""
    model = make_model(loss=loss)
    settings = TrainingSettings(optimizer=optimizer, loss=loss, seed=3)
    step = make_step(model, settings, communicator, micro_batches, denominators=LossDenominators(kind, EXPECTED))
    for update in range(1, UPDATES + 1):
        own_packs = packs_of(update)[communicator.rank :: communicator.size]
        step.run_update([packed(own_packs[part::micro_batches]) for part in range(micro_batches)], update, 1e-3)
    return model.copy_variables()


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(values - other[name]).max()) for name, values in one.items())
