"""The few operations that BERT consists of, each with the cheapest backward pass that we know.

Where TensorFlow's own gradient would make many passes over a large tensor, or a sparse result of unknown size, the gradient
is written out here. No operation has a shape that depends on data, and integers are int32: Gaudi compiles the graph once for
one set of shapes. What goes over the elements of a tensor several times is a kernel: on a CPU, `compiled` kernels (XLA) make
one pass of it; Gaudi's graph compiler does the like by itself, so there they stay plain.

Letters: R rows of a table, B packs, P positions of a pack, T tokens (packs x positions), H features of the last axis, I
inputs and O outputs of a dense layer. "wide" is the type of what must not be rounded (layer norm, softmax, losses): float32,
also where the matrices are bfloat16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

Kernel = Callable[..., Any]

# Numbers so far apart share a set of the first cache: 64 sets of 64 bytes on every x86 processor of today.
_CACHE_SETS_BYTES = 4096
# Rows are longer by so much, so that each begins in the next set.
_CACHE_LINE_BYTES = 64


def as_graph(function: Kernel) -> tf.types.experimental.PolymorphicFunction:
    """`function` as a graph. No Python control flow on tensors has to be rewritten, which saves time while tracing."""
    return tf.function(function, autograph=False, reduce_retracing=False)


@functools.cache
def _compile(function: Kernel) -> Kernel:
    return tf.function(function, jit_compile=True, autograph=False)


def kernel(function: Kernel, compiled: bool) -> Kernel:
    """`function`, or what XLA makes of it; compiled once for each set of shapes."""
    return _compile(function) if compiled else function


def widen(tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` in at least float32."""
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor


def dense(inputs_TI: tf.Tensor, kernel_IO: tf.Tensor, bias_O: tf.Tensor, compiled: bool = False) -> tf.Tensor:
    """`inputs @ kernel + bias`, in the type of `inputs`; `compiled` means that a CPU computes it."""
    kernel_IO, bias_O = tf.cast(kernel_IO, inputs_TI.dtype), tf.cast(bias_O, inputs_TI.dtype)
    if compiled and any(_collides(width, kernel_IO.dtype) for width in kernel_IO.shape):
        return _spread_dense(inputs_TI, kernel_IO, bias_O)
    return tf.nn.bias_add(tf.matmul(inputs_TI, kernel_IO), bias_O)


def _collides(width: int, dtype: tf.DType) -> bool:
    """Whether rows of so many numbers begin at the same lines of the cache."""
    return width * dtype.size % _CACHE_SETS_BYTES == 0


@tf.custom_gradient
def _spread_dense(inputs_TI: tf.Tensor, kernel_IO: tf.Tensor, bias_O: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
    """`dense` for widths that collide, such as 1,024 float32.

    The kernel's gradient is a sum over rows, so it reads down the columns of both operands, whose numbers then push each
    other out of the cache: half the speed on AVX2. Rows that are a little longer than their numbers do not.
    """
    inputs, outputs = kernel_IO.shape

    def backward(gradient_TO: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        kernel_gradient_IO = tf.matmul(_spread(inputs_TI), _spread(gradient_TO), transpose_a=True)[:inputs, :outputs]
        bias_gradient_O = tf.raw_ops.BiasAddGrad(out_backprop=gradient_TO)
        return tf.matmul(gradient_TO, kernel_IO, transpose_b=True), kernel_gradient_IO, bias_gradient_O

    return tf.nn.bias_add(tf.matmul(inputs_TI, kernel_IO), bias_O), backward


def _spread(values_TX: tf.Tensor) -> tf.Tensor:
    """With zeros behind each row where rows would collide."""
    width, dtype = values_TX.shape[1], values_TX.dtype
    extra = _CACHE_LINE_BYTES // dtype.size if _collides(width, dtype) else 0
    return tf.pad(values_TX, [[0, 0], [0, extra]]) if extra else values_TX


@tf.custom_gradient
def gather_rows(table_RH: tf.Tensor, indices_T: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
    """Rows of `table_RH`; its gradient is dense at once, to be added to that of the tied output matrix."""
    rows = table_RH.shape[0]

    def backward(gradient_TH: tf.Tensor) -> tuple[tf.Tensor, None]:
        return tf.math.unsorted_segment_sum(gradient_TH, indices_T, rows), None

    return tf.gather(table_RH, indices_T), backward


def pick_tokens(hidden_TH: tf.Tensor, positions_BP: tf.Tensor, length: int) -> tf.Tensor:
    """The rows at `positions_BP` (int32, each within its pack of `length` positions), flat: [B * P, H]."""
    packs = positions_BP.shape[0]
    starts_B1 = tf.range(0, packs * length, length, dtype=tf.int32)[:, tf.newaxis]
    return gather_rows(hidden_TH, tf.reshape(positions_BP + starts_B1, [-1]))


@tf.custom_gradient
def without_gradient(variable: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
    """`variable` with a gradient of exact zeros (unlike `tf.stop_gradient`, whose gradient is None)."""
    return tf.identity(variable), tf.zeros_like


def layer_norm(inputs_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor, epsilon: float, compiled: bool) -> tf.Tensor:
    """Layer norm over the last axis (Ba et al., 2016), computed wide, returned in the type of `inputs_TH`."""

    @tf.custom_gradient
    def core(inputs_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        outputs_TH, normal_TH, scale_T1 = kernel(_normalise, compiled)(inputs_TH, gamma_H, beta_H, epsilon)

        def backward(gradient_TH: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            return kernel(_normalise_backward, compiled)(gradient_TH, normal_TH, scale_T1, gamma_H)

        return outputs_TH, backward

    return core(inputs_TH, gamma_H, beta_H)


def residual_layer_norm(
    new_TH: tf.Tensor,
    old_TH: tf.Tensor,
    gamma_H: tf.Tensor,
    beta_H: tf.Tensor,
    drawn: tf.Tensor | None,
    rate: float,
    epsilon: float,
    compiled: bool,
) -> tf.Tensor:
    """Layer norm of dropout(new) + old, in the type of `new_TH`; `drawn` is from `ForwardPass.draw`."""

    @tf.custom_gradient
    def core(
        new_TH: tf.Tensor, old_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[..., Any]]:
        forward = kernel(_add_and_normalise, compiled)
        outputs_TH, normal_TH, scale_T1 = forward(new_TH, old_TH, gamma_H, beta_H, drawn, rate, epsilon)

        def backward(gradient_TH: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
            return kernel(_add_and_normalise_backward, compiled)(gradient_TH, normal_TH, scale_T1, gamma_H, drawn, rate)

        return outputs_TH, backward

    return core(new_TH, old_TH, gamma_H, beta_H)


def activation(name: str, compiled: bool) -> Callable[[tf.Tensor], tf.Tensor]:
    """The function called `name` in `config.json`: gelu (exact), gelu_new (by tanh) or relu."""
    if name != "gelu":
        return tf.nn.relu if name == "relu" else functools.partial(tf.nn.gelu, approximate=True)

    @tf.custom_gradient
    def gelu(inputs: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        """x * Phi(x) with the exact normal distribution function (Hendrycks and Gimpel, 2016)."""

        def backward(gradient: tf.Tensor) -> tf.Tensor:
            return kernel(_gelu_backward, compiled)(gradient, inputs)

        return kernel(_gelu_forward, compiled)(inputs), backward

    return gelu


def dropout(inputs: tf.Tensor, drawn: tf.Tensor | None, rate: float, compiled: bool) -> tf.Tensor:
    """Zero a share `rate` of `inputs` and scale the rest up; `drawn` is from `ForwardPass.draw`, None for no dropout."""
    if drawn is None:
        return inputs

    @tf.custom_gradient
    def core(inputs: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        def backward(gradient: tf.Tensor) -> tf.Tensor:
            return kernel(_drop, compiled)(gradient, drawn, rate)

        return kernel(_drop, compiled)(inputs, drawn, rate), backward

    return core(inputs)


def _normalise(
    inputs_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Outputs, normalised inputs, and 1 / standard deviation of each row."""
    wide_TH = widen(inputs_TH)
    centred_TH = wide_TH - tf.reduce_mean(wide_TH, axis=-1, keepdims=True)
    variance_T1 = tf.reduce_mean(tf.square(centred_TH), axis=-1, keepdims=True)
    scale_T1 = tf.math.rsqrt(variance_T1 + tf.cast(epsilon, wide_TH.dtype))
    normal_TH = centred_TH * scale_T1
    outputs_TH = normal_TH * tf.cast(gamma_H, wide_TH.dtype) + tf.cast(beta_H, wide_TH.dtype)
    return tf.cast(outputs_TH, inputs_TH.dtype), normal_TH, scale_T1


def _normalise_backward(
    gradient_TH: tf.Tensor, normal_TH: tf.Tensor, scale_T1: tf.Tensor, gamma_H: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Gradients of inputs, gamma and beta."""
    wide_TH = widen(gradient_TH)
    product_TH = wide_TH * normal_TH
    gamma_H = tf.cast(gamma_H, wide_TH.dtype)
    mean_T1 = tf.reduce_mean(wide_TH * gamma_H, axis=-1, keepdims=True)
    slope_T1 = tf.reduce_mean(product_TH * gamma_H, axis=-1, keepdims=True)
    inputs_gradient_TH = (wide_TH * gamma_H - mean_T1 - normal_TH * slope_T1) * scale_T1
    sums = tf.reduce_sum(product_TH, axis=0), tf.reduce_sum(wide_TH, axis=0)
    return tf.cast(inputs_gradient_TH, gradient_TH.dtype), *sums


def _add_and_normalise(
    new_TH: tf.Tensor,
    old_TH: tf.Tensor,
    gamma_H: tf.Tensor,
    beta_H: tf.Tensor,
    drawn: tf.Tensor | None,
    rate: float,
    epsilon: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    return _normalise(_drop(new_TH, drawn, rate) + old_TH, gamma_H, beta_H, epsilon)


def _add_and_normalise_backward(
    gradient_TH: tf.Tensor,
    normal_TH: tf.Tensor,
    scale_T1: tf.Tensor,
    gamma_H: tf.Tensor,
    drawn: tf.Tensor | None,
    rate: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Gradients of new, old, gamma and beta."""
    total_gradient_TH, gamma_gradient_H, beta_gradient_H = _normalise_backward(gradient_TH, normal_TH, scale_T1, gamma_H)
    return _drop(total_gradient_TH, drawn, rate), total_gradient_TH, gamma_gradient_H, beta_gradient_H


def _drop(inputs: tf.Tensor, drawn: tf.Tensor | None, rate: float) -> tf.Tensor:
    if drawn is None:
        return inputs
    return inputs * (keep_mask(drawn, inputs.shape, rate, inputs.dtype) * keep_scale(drawn, rate))


def _gelu_share(inputs: tf.Tensor) -> tf.Tensor:
    return 0.5 * (1.0 + tf.math.erf(inputs * math.sqrt(0.5)))


def _gelu_forward(inputs: tf.Tensor) -> tf.Tensor:
    return inputs * _gelu_share(inputs)


def _gelu_backward(gradient: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
    density = tf.exp(-0.5 * tf.square(inputs)) * (1.0 / math.sqrt(2.0 * math.pi))
    return gradient * (_gelu_share(inputs) + inputs * density)


# --- Dropout without state: which elements are dropped is a function of a seed, so a resumed run repeats itself to the bit
#
# Two ways to draw. Plain: TensorFlow's counter-based Philox numbers (Salmon et al., 2011), 16 bits an element, because
# numbers are most of what dropout costs on a CPU; the mask is stored for the backward pass. Hashed, inside compiled kernels:
# a hash of the element's number and the seed, two rounds of MurmurHash3's finaliser (Appleby, 2011), which costs no pass
# over memory at all and is simply computed again in the backward pass, so no mask is stored.
#
# Both round the share that is dropped to 1 / 65,536, and scale by exactly that rounded share.

# 2^32 divided by the golden ratio, odd, as a signed 32-bit number: multiples by the numbers of the sites are
# far apart (Knuth, TAOCP 3, 6.4).
_GOLDEN_STRIDE = 0x9E3779B1 - (1 << 32)
_FIRST_FACTOR, _SECOND_FACTOR = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)
_STEPS = 1 << 16


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
    return 1.0 if drawn is None else _STEPS / (_STEPS - _dropped_steps(rate))


def _mixed(words: tf.Tensor) -> tf.Tensor:
    """MurmurHash3's finaliser on int32; arithmetic wraps, shifts must not carry the sign."""
    words = tf.bitwise.bitwise_xor(words, _shifted(words, 16)) * _FIRST_FACTOR
    words = tf.bitwise.bitwise_xor(words, _shifted(words, 13)) * _SECOND_FACTOR
    return tf.bitwise.bitwise_xor(words, _shifted(words, 16))


def _shifted(words: tf.Tensor, bits: int) -> tf.Tensor:
    """Logical shift to the right."""
    return tf.bitwise.bitwise_and(tf.bitwise.right_shift(words, bits), (1 << (32 - bits)) - 1)


def _dropped_steps(rate: float) -> int:
    return max(1, round(rate * _STEPS))


def _threshold(rate: float) -> int:
    """The smallest signed 32-bit number that is not dropped."""
    return _wrapped((_dropped_steps(rate) << 16) - (1 << 31))


def _wrapped(value: int) -> int:
    """`value` as a signed 32-bit number."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


@dataclass(frozen=True)
class ForwardPass:
    """The part of a pass that every layer is given: the seed of dropout, int32 [2] or None for none, and whether kernels are
    compiled.
    """

    dropout_seed: tf.Tensor | None = None
    compiled: bool = False

    def draw(self, shape: tf.TensorShape, rate: float, site: int) -> tf.Tensor | None:
        """The inputs of `keep_mask` for the dropout with the number `site` in the model; None where nothing is dropped."""
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
