"""Models behind the engines' protocol, and what a TensorFlow BERT of the tests gives."""

from __future__ import annotations

from gaudi_bert.common.arrays import BatchArrays
from gaudi_bert.config.values import EngineName
from gaudi_bert.engines.choose import load_engine
from gaudi_bert.engines.protocol import Model, ModelSpec, Trial
from gaudi_bert.engines.tensorflow.bert import BertForPretraining
from gaudi_bert.engines.tensorflow.model import TensorFlowModel
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import Head, Loss, PretrainingHead


def pretraining_model(
    config: BertConfig, seed: int | None, loss: Loss = "token", engine: EngineName = "tensorflow"
) -> Model:
    return model_of(config, PretrainingHead(loss), seed, engine)


def model_of(config: BertConfig, head: Head, seed: int | None = 1, engine: EngineName = "tensorflow") -> Model:
    return load_engine(engine).build(ModelSpec(config, head), seed=seed)


def as_model(bert: BertForPretraining) -> TensorFlowModel:
    """The same variables behind the protocol."""
    model = TensorFlowModel(ModelSpec(bert.config, PretrainingHead()), seed=None)
    model.bert = bert
    return model


def gradients_of(bert: BertForPretraining, batch: BatchArrays, loss: Loss) -> Trial:
    return as_model(bert).trial(batch, loss)
