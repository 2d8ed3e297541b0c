"""How one forward pass is run, as opposed to what it computes."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from gaudi_bert.model.dropout import fold_seed, plain_mask

__all__ = ["ForwardPass"]


@dataclass(frozen=True)
class ForwardPass:
    """What every layer is handed.

    Attributes:
        dropout_seed: int32 [2], another one for every pass of a training run; None for no dropout.
        compiled: make one pass over memory of each chain of elementwise operations, by XLA (for CPUs).
    """

    dropout_seed: tf.Tensor | None = None
    compiled: bool = False

    def draw(self, shape: tf.TensorShape, rate: float, site: int) -> tf.Tensor | None:
        """What `kept_places` needs to know for one dropout; None where nothing is dropped.

        Args:
            shape: of what is dropped from, static.
            rate: share that is dropped.
            site: number of the place in the model.
        """
        if self.dropout_seed is None or rate == 0:
            return None
        seed_2 = fold_seed(self.dropout_seed, site)
        return seed_2 if self.compiled else plain_mask(shape, rate, seed_2)
