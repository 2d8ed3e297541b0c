"""The few operations that BERT is made of, each with the cheapest backward pass that we know.

Where TensorFlow's own gradient would make many passes over a large tensor, or a sparse result of unknown
size, the gradient is written out here. No operation has a shape that depends on data, none is `where`,
`boolean_mask` or `unique`, and integers are int32: Gaudi compiles the graph once for one set of shapes.

Letters: R rows of a table, T tokens (packs x positions), H features of the last axis, I inputs and O outputs
of a dense layer. "wide" is the type of what must not be rounded (layer norm, softmax, losses): float32, also
where the matrices are bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

__all__ = [
    "activation",
    "dense",
    "dropout",
    "dropout_mask",
    "gather_rows",
    "gelu",
    "layer_norm",
    "widen",
    "without_gradient",
]

# 2^32 divided by the golden ratio, odd, as a signed 32-bit number: consecutive multiples are far apart
# (Knuth, TAOCP 3, 6.4).
GOLDEN_STRIDE = 0x9E3779B1 - (1 << 32)


def widen(tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` in at least float32."""
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor


def dense(inputs_TI: tf.Tensor, kernel_IO: tf.Tensor, bias_O: tf.Tensor) -> tf.Tensor:
    """`inputs @ kernel + bias`, in the type of `inputs`."""
    kernel_IO, bias_O = tf.cast(kernel_IO, inputs_TI.dtype), tf.cast(bias_O, inputs_TI.dtype)
    return tf.nn.bias_add(tf.matmul(inputs_TI, kernel_IO), bias_O)


@tf.custom_gradient
def gather_rows(table_RH: tf.Tensor, indices_T: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Rows of `table_RH`; its gradient is dense at once.

    TensorFlow's own gradient is an `IndexedSlices`. Added to the dense gradient of the tied output matrix
    it would be widened to a slice of the whole vocabulary plus every token; summed into its rows first,
    it is one addition.
    """
    rows = table_RH.shape[0]

    def backward(gradient_TH: tf.Tensor) -> tuple[tf.Tensor, None]:
        return tf.math.unsorted_segment_sum(gradient_TH, indices_T, rows), None

    return tf.gather(table_RH, indices_T), backward


@tf.custom_gradient
def without_gradient(variable: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """`variable` with a gradient of exact zeros (unlike `tf.stop_gradient`, whose gradient is None)."""
    return tf.identity(variable), tf.zeros_like


def layer_norm(inputs_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor, epsilon: float) -> tf.Tensor:
    """Layer norm over the last axis (Ba et al., 2016), computed wide, returned in the type of `inputs_TH`."""
    return tf.cast(_wide_layer_norm(widen(inputs_TH), gamma_H, beta_H, epsilon), inputs_TH.dtype)


def _wide_layer_norm(inputs_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor, epsilon: float) -> tf.Tensor:
    @tf.custom_gradient
    def normalise(inputs_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        gamma_H, beta_H = tf.cast(gamma_H, inputs_TH.dtype), tf.cast(beta_H, inputs_TH.dtype)
        centred_TH = inputs_TH - tf.reduce_mean(inputs_TH, axis=-1, keepdims=True)
        variance_T1 = tf.reduce_mean(tf.square(centred_TH), axis=-1, keepdims=True)
        scale_T1 = tf.math.rsqrt(variance_T1 + tf.cast(epsilon, inputs_TH.dtype))
        normal_TH = centred_TH * scale_T1

        def backward(gradient_TH: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            product_TH = gradient_TH * normal_TH
            weighted_TH = gradient_TH * gamma_H
            mean_T1 = tf.reduce_mean(weighted_TH, axis=-1, keepdims=True)
            slope_T1 = tf.reduce_mean(product_TH * gamma_H, axis=-1, keepdims=True)
            inputs_gradient_TH = (weighted_TH - mean_T1 - normal_TH * slope_T1) * scale_T1
            return inputs_gradient_TH, tf.reduce_sum(product_TH, axis=0), tf.reduce_sum(gradient_TH, axis=0)

        return normal_TH * gamma_H + beta_H, backward

    return normalise(inputs_TH, gamma_H, beta_H)


@tf.custom_gradient
def gelu(inputs: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """x * Phi(x) with the exact normal distribution function (Hendrycks and Gimpel, 2016)."""
    share = 0.5 * (1.0 + tf.math.erf(inputs * math.sqrt(0.5)))

    def backward(gradient: tf.Tensor) -> tf.Tensor:
        density = tf.exp(-0.5 * tf.square(inputs)) * (1.0 / math.sqrt(2.0 * math.pi))
        return gradient * (share + inputs * density)

    return inputs * share, backward


def activation(name: str) -> Callable[[tf.Tensor], tf.Tensor]:
    """The function called `name` in `config.json`: gelu (exact), gelu_new (by tanh) or relu."""
    functions = {"gelu": gelu, "gelu_new": lambda inputs: tf.nn.gelu(inputs, approximate=True), "relu": tf.nn.relu}
    return functions[name]


def dropout(inputs: tf.Tensor, rate: float, seed_2: tf.Tensor | None, site: int) -> tf.Tensor:
    """Zero a share `rate` of `inputs` and scale the rest up; nothing where `seed_2` is None or `rate` is 0.

    Args:
        inputs: any shape, static.
        rate: share that is dropped.
        seed_2: int32 [2], of this pass.
        site: number of the place in the model.
    """
    if seed_2 is None or rate == 0:
        return inputs
    kept, scale = dropout_mask(inputs.shape, rate, seed_2, site, inputs.dtype)
    return inputs * (kept * scale)


def dropout_mask(
    shape: tf.TensorShape, rate: float, seed_2: tf.Tensor, site: int, dtype: tf.DType
) -> tuple[tf.Tensor, float]:
    """Ones where a number is kept and zeros where it is dropped, and by how much the kept ones are to be scaled.

    Random numbers are a third of what dropout costs on a CPU, so 16 bits decide each place: a 32-bit word
    serves two, once as it is and once with its lower half moved up. The share is rounded to 1 / 65,536, and
    the scale is that of the rounded share. The same
    seed drops the same places: a resumed run repeats itself to the bit.

    Args:
        shape: static.
        rate: share that is dropped, above 0.
        seed_2: int32 [2], of this pass.
        site: number of the place in the model, folded into the first word of the seed.
        dtype: of the mask.
    """
    places = shape.num_elements()
    folded_2 = seed_2 + tf.constant([_wrapped(site * GOLDEN_STRIDE), 0], dtype=tf.int32)
    words = tf.random.stateless_uniform([(places + 1) // 2], folded_2, minval=None, maxval=None, dtype=tf.int32)
    noise = tf.concat([words, tf.bitwise.left_shift(words, 16)], axis=0)[:places]
    dropped = max(1, round(rate * 65536))
    kept = tf.cast(noise >= _wrapped((dropped << 16) - (1 << 31)), dtype)
    return tf.reshape(kept, shape), 65536 / (65536 - dropped)


def _wrapped(value: int) -> int:
    """`value` as a signed 32-bit number."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
