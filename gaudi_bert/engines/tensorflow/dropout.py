"""Dropout without state: which elements are dropped is a function of a seed, so a resumed run repeats itself to the bit.

Two ways to draw. Plain: TensorFlow's counter-based Philox numbers (Salmon et al., 2011), 16 bits an element,
because numbers are most of what dropout costs on a CPU; the mask is stored for the backward pass. Hashed,
inside compiled kernels: a hash of the element's number and the seed, two rounds of MurmurHash3's finaliser (Appleby,
2011), which costs no pass over memory at all and is simply computed again in the backward pass, so no mask is
stored.

Both round the share that is dropped to 1 / 65,536, and scale by exactly that rounded share.
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

# 2^32 divided by the golden ratio, odd, as a signed 32-bit number: multiples by the numbers of the sites are
# far apart (Knuth, TAOCP 3, 6.4).
_GOLDEN_STRIDE = 0x9E3779B1 - (1 << 32)
FIRST_FACTOR, SECOND_FACTOR = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)
STEPS = 1 << 16


def keep_mask(drawn: tf.Tensor, shape: tf.TensorShape, rate: float, dtype: tf.DType) -> tf.Tensor:
    """Ones where a number remains and zeros where it is dropped.

    `drawn` is the mask, a byte an element, or, for hashing, a folded seed, int32 [2]; `rate` is the share that is dropped.
    """
    if drawn.dtype != tf.int32:
        return tf.cast(drawn, dtype)
    # The seed is hashed to two keys first: were it added to the element's number, seeds that differ by one would give the
    # same mask, moved.
    elements = tf.reshape(tf.range(shape.num_elements(), dtype=tf.int32), shape)
    first_key = _mixed(drawn[0] + _mixed(drawn[1]))
    second_key = _mixed(drawn[1] + _mixed(first_key + _GOLDEN_STRIDE))
    hashed = _mixed(_mixed(tf.bitwise.bitwise_xor(elements, first_key)) + second_key)
    return tf.cast(hashed >= _threshold(rate), dtype)


def keep_scale(drawn: tf.Tensor | None, rate: float) -> float:
    """Return what the remaining numbers are multiplied by, so that the mean stays."""
    return 1.0 if drawn is None else STEPS / (STEPS - _dropped_steps(rate))


def _mixed(words: tf.Tensor) -> tf.Tensor:
    """MurmurHash3's finaliser on int32; arithmetic wraps, shifts must not carry the sign."""
    words = tf.bitwise.bitwise_xor(words, _shifted(words, 16)) * FIRST_FACTOR
    words = tf.bitwise.bitwise_xor(words, _shifted(words, 13)) * SECOND_FACTOR
    return tf.bitwise.bitwise_xor(words, _shifted(words, 16))


def _shifted(words: tf.Tensor, bits: int) -> tf.Tensor:
    """Logical shift to the right."""
    return tf.bitwise.bitwise_and(tf.bitwise.right_shift(words, bits), (1 << (32 - bits)) - 1)


def _dropped_steps(rate: float) -> int:
    return max(1, round(rate * STEPS))


def _threshold(rate: float) -> int:
    """The smallest signed 32-bit number that is not dropped."""
    return _wrapped((_dropped_steps(rate) << 16) - (1 << 31))


def _wrapped(value: int) -> int:
    """`value` as a signed 32-bit number."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


# --- How one forward pass is run, as opposed to what it computes


@dataclass(frozen=True)
class ForwardPass:
    """The part of a pass that every layer is given.

    `dropout_seed` is int32 [2], another one for every pass of a training run; None for no dropout. `compiled` makes one
    pass over memory of each chain of elementwise operations, by XLA (for CPUs).
    """

    dropout_seed: tf.Tensor | None = None
    compiled: bool = False

    def draw(self, shape: tf.TensorShape, rate: float, site: int) -> tf.Tensor | None:
        """The inputs of `keep_mask` for one dropout; None where nothing is dropped.

        `site` is the number of this dropout in the model.
        """
        if self.dropout_seed is None or rate == 0:
            return None
        seed_2 = self.dropout_seed + tf.constant([_wrapped(site * _GOLDEN_STRIDE), 0], dtype=tf.int32)
        if self.compiled:
            return seed_2
        # A random 32-bit word serves two elements: once as it is, and once with its lower half moved up.
        elements = shape.num_elements()
        words = tf.random.stateless_uniform([(elements + 1) // 2], seed_2, minval=None, maxval=None, dtype=tf.int32)
        noise = tf.concat([words, tf.bitwise.left_shift(words, 16)], axis=0)[:elements]
        return tf.reshape(noise >= _threshold(rate), shape)
