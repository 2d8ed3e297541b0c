"""The operations of BERT in TensorFlow, each with an efficient backward pass.

If TensorFlow's own gradient makes many passes over a large tensor, or returns a sparse result of unknown size, the gradient
is implemented here. Shapes never depend on data, and integers are int32, because Gaudi compiles a graph once for one set of
shapes. Chains of elementwise operations are *kernels*. On a CPU, XLA compiles a kernel to a single pass over memory. On
Gaudi, kernels are not compiled here, because its graph compiler fuses such chains by itself.

Letters in shapes: R rows of a table, B packs, P positions of a pack, T tokens (packs x positions), H features of the last
axis, I inputs and O outputs of a dense layer. The prefix `wide_` marks values in at least float32, in which layer
normalization, softmax and losses are computed even if the matrix products are in bfloat16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

Kernel = Callable[..., Any]

# On all current x86 processors, the L1 cache has 64 sets of 64-byte lines. Addresses that differ by a multiple of 4,096
# bytes share a set, so their data can evict each other.
_CACHE_SETS_BYTES = 4096
# If all rows of a matrix begin in the same set of the L1 cache, each row is padded by this size. Each row then begins in
# another set than the row before it.
_CACHE_LINE_BYTES = 64


def make_graph_function(function: Kernel) -> tf.types.experimental.PolymorphicFunction:
    """Return a function that runs `function` as a TensorFlow graph.

    AutoGraph is off, because no Python control flow depends on tensors.
    """
    return tf.function(function, autograph=False, reduce_retracing=False)


@functools.cache
def _compile_with_xla(function: Kernel) -> Kernel:
    """Return a version of `function` that is compiled by XLA."""
    return tf.function(function, jit_compile=True, autograph=False)


def compile_kernel_if_enabled(kernel: Kernel, is_enabled: bool) -> Kernel:
    """Return a kernel compiled by XLA if `is_enabled` is true, and otherwise the kernel itself.

    XLA compiles the kernel once for each set of shapes.
    """
    return _compile_with_xla(kernel) if is_enabled else kernel


def upcast_to_float32(tensor: tf.Tensor) -> tf.Tensor:
    """Convert a bfloat16 tensor to float32, and return other tensors unchanged."""
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor


def dense(inputs_TI: tf.Tensor, kernel_IO: tf.Tensor, bias_O: tf.Tensor, compiled: bool = False) -> tf.Tensor:
    """Compute `inputs @ kernel + bias` in the dtype of the inputs.

    `compiled` is only true on CPUs. In this case, the gradient of the kernel is computed without cache collisions.
    """
    kernel_IO, bias_O = tf.cast(kernel_IO, inputs_TI.dtype), tf.cast(bias_O, inputs_TI.dtype)
    if compiled and any(_rows_collide_in_cache(width, kernel_IO.dtype) for width in kernel_IO.shape):
        return _dense_without_cache_collisions(inputs_TI, kernel_IO, bias_O)
    return tf.nn.bias_add(tf.matmul(inputs_TI, kernel_IO), bias_O)


def _rows_collide_in_cache(row_elements: int, dtype: tf.DType) -> bool:
    """Return whether all rows of a matrix with `row_elements` columns begin in the same set of the L1 cache.

    Such rows evict each other from the cache.
    """
    return row_elements * dtype.size % _CACHE_SETS_BYTES == 0


@tf.custom_gradient
def _dense_without_cache_collisions(
    inputs_TI: tf.Tensor, kernel_IO: tf.Tensor, bias_O: tf.Tensor
) -> tuple[tf.Tensor, Callable[..., Any]]:
    """Compute `dense`, and avoid cache collisions when the gradient of the kernel is computed. They occur if the inputs have
    1,024 float32 columns, for example.

    The gradient of the kernel is a sum over rows, so it reads both operands column by column. The elements of a column would
    evict each other from the cache, which halves the speed on AVX2. Padding the rows a little prevents this.
    """
    inputs, outputs = kernel_IO.shape

    def backward(gradient_TO: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        kernel_gradient_IO = tf.matmul(
            _pad_rows_against_cache_collisions(inputs_TI), _pad_rows_against_cache_collisions(gradient_TO), transpose_a=True
        )[:inputs, :outputs]
        return (
            tf.matmul(gradient_TO, kernel_IO, transpose_b=True),
            kernel_gradient_IO,
            tf.raw_ops.BiasAddGrad(out_backprop=gradient_TO),
        )

    return tf.nn.bias_add(tf.matmul(inputs_TI, kernel_IO), bias_O), backward


def _pad_rows_against_cache_collisions(values_TX: tf.Tensor) -> tf.Tensor:
    """Pad the rows of a matrix with zeros if they would collide in the L1 cache. Otherwise, return the matrix unchanged."""
    width, dtype = values_TX.shape[1], values_TX.dtype
    extra = _CACHE_LINE_BYTES // dtype.size if _rows_collide_in_cache(width, dtype) else 0
    return tf.pad(values_TX, [[0, 0], [0, extra]]) if extra else values_TX


@tf.custom_gradient
def gather_rows(table_RH: tf.Tensor, indices_T: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
    """Return the rows of a table at the given indices.

    The gradient is dense, because it is added to the dense gradient of the tied output matrix anyway.
    """
    rows = table_RH.shape[0]

    def backward(gradient_TH: tf.Tensor) -> tuple[tf.Tensor, None]:
        return tf.math.unsorted_segment_sum(gradient_TH, indices_T, rows), None

    return tf.gather(table_RH, indices_T), backward


def gather_tokens(hidden_TH: tf.Tensor, positions_BP: tf.Tensor, pack_length: int) -> tf.Tensor:
    """Return the hidden states at the given positions of each pack.

    The result is flattened to [B * P, H].

    Args:
        hidden_TH: The hidden states of all tokens.
        positions_BP: int32, positions within the packs.
        pack_length: The number of positions of a pack.
    """
    starts_B1 = tf.range(0, positions_BP.shape[0] * pack_length, pack_length, dtype=tf.int32)[:, tf.newaxis]
    return gather_rows(hidden_TH, tf.reshape(positions_BP + starts_B1, [-1]))


@tf.custom_gradient
def copy_with_zero_gradient(variable: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
    """Return a copy of a variable with a gradient of zero. `tf.stop_gradient` would make the gradient None instead."""
    return tf.identity(variable), tf.zeros_like


def layer_norm(inputs_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor, epsilon: float, compiled: bool) -> tf.Tensor:
    """Apply layer normalization over the last axis (Ba et al., 2016).

    The result is computed in at least float32, and has the dtype of the inputs.
    """

    @tf.custom_gradient
    def core(inputs_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        outputs_TH, normal_TH, scale_T1 = compile_kernel_if_enabled(_layer_norm_forward, compiled)(
            inputs_TH, gamma_H, beta_H, epsilon
        )

        def backward(gradient_TH: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            return compile_kernel_if_enabled(_layer_norm_backward, compiled)(gradient_TH, normal_TH, scale_T1, gamma_H)

        return outputs_TH, backward

    return core(inputs_TH, gamma_H, beta_H)


def residual_layer_norm(
    new_TH: tf.Tensor,
    old_TH: tf.Tensor,
    gamma_H: tf.Tensor,
    beta_H: tf.Tensor,
    dropout_draw: tf.Tensor | None,
    rate: float,
    epsilon: float,
    compiled: bool,
) -> tf.Tensor:
    """Apply dropout to the new hidden states, add the old ones, and apply layer normalization to the sum.

    The result has the dtype of `new_TH`. `dropout_draw` contains the random numbers from `ForwardPass.draw_dropout`, or is
    None for no dropout.
    """

    @tf.custom_gradient
    def core(
        new_TH: tf.Tensor, old_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[..., Any]]:
        forward = compile_kernel_if_enabled(_residual_layer_norm_forward, compiled)
        outputs_TH, normal_TH, scale_T1 = forward(new_TH, old_TH, gamma_H, beta_H, dropout_draw, rate, epsilon)

        def backward(gradient_TH: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
            return compile_kernel_if_enabled(_residual_layer_norm_backward, compiled)(
                gradient_TH, normal_TH, scale_T1, gamma_H, dropout_draw, rate
            )

        return outputs_TH, backward

    return core(new_TH, old_TH, gamma_H, beta_H)


def get_activation_function(name: str, compiled: bool) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return the activation function with the given name, which is gelu (exact), gelu_new (tanh approximation) or relu."""
    if name != "gelu":
        return tf.nn.relu if name == "relu" else functools.partial(tf.nn.gelu, approximate=True)

    @tf.custom_gradient
    def gelu(inputs: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        """Compute x * Phi(x) with the exact normal distribution function (Hendrycks and Gimpel, 2016)."""

        def backward(gradient: tf.Tensor) -> tf.Tensor:
            return compile_kernel_if_enabled(_gelu_backward, compiled)(gradient, inputs)

        return compile_kernel_if_enabled(_gelu_forward, compiled)(inputs), backward

    return gelu


def dropout(inputs: tf.Tensor, dropout_draw: tf.Tensor | None, rate: float, compiled: bool) -> tf.Tensor:
    """Set a fraction `rate` of the inputs to zero, and scale up the others.

    `dropout_draw` contains the random numbers from `ForwardPass.draw_dropout`, or is None for no dropout.
    """
    if dropout_draw is None:
        return inputs

    @tf.custom_gradient
    def core(inputs: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        def backward(gradient: tf.Tensor) -> tf.Tensor:
            return compile_kernel_if_enabled(_apply_dropout, compiled)(gradient, dropout_draw, rate)

        return compile_kernel_if_enabled(_apply_dropout, compiled)(inputs, dropout_draw, rate), backward

    return core(inputs)


def _layer_norm_forward(
    inputs_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the outputs of a layer normalization, the normalized inputs, and the inverse standard deviation of each row."""
    wide_TH = upcast_to_float32(inputs_TH)
    centred_TH = wide_TH - tf.reduce_mean(wide_TH, axis=-1, keepdims=True)
    variance_T1 = tf.reduce_mean(tf.square(centred_TH), axis=-1, keepdims=True)
    scale_T1 = tf.math.rsqrt(variance_T1 + tf.cast(epsilon, wide_TH.dtype))
    normal_TH = centred_TH * scale_T1
    outputs_TH = normal_TH * tf.cast(gamma_H, wide_TH.dtype) + tf.cast(beta_H, wide_TH.dtype)
    return tf.cast(outputs_TH, inputs_TH.dtype), normal_TH, scale_T1


def _layer_norm_backward(
    gradient_TH: tf.Tensor, normal_TH: tf.Tensor, scale_T1: tf.Tensor, gamma_H: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the gradients of the inputs, gamma and beta of a layer normalization."""
    wide_TH = upcast_to_float32(gradient_TH)
    product_TH = wide_TH * normal_TH
    gamma_H = tf.cast(gamma_H, wide_TH.dtype)
    mean_T1 = tf.reduce_mean(wide_TH * gamma_H, axis=-1, keepdims=True)
    slope_T1 = tf.reduce_mean(product_TH * gamma_H, axis=-1, keepdims=True)
    inputs_gradient_TH = (wide_TH * gamma_H - mean_T1 - normal_TH * slope_T1) * scale_T1
    sums = tf.reduce_sum(product_TH, axis=0), tf.reduce_sum(wide_TH, axis=0)
    return tf.cast(inputs_gradient_TH, gradient_TH.dtype), *sums


def _residual_layer_norm_forward(
    new_TH: tf.Tensor,
    old_TH: tf.Tensor,
    gamma_H: tf.Tensor,
    beta_H: tf.Tensor,
    dropout_draw: tf.Tensor | None,
    rate: float,
    epsilon: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Apply dropout to the new hidden states, add the old ones, and return the three results of `_layer_norm_forward`."""
    return _layer_norm_forward(_apply_dropout(new_TH, dropout_draw, rate) + old_TH, gamma_H, beta_H, epsilon)


def _residual_layer_norm_backward(
    gradient_TH: tf.Tensor,
    normal_TH: tf.Tensor,
    scale_T1: tf.Tensor,
    gamma_H: tf.Tensor,
    dropout_draw: tf.Tensor | None,
    rate: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the gradients of the new hidden states, the old hidden states, gamma and beta of `residual_layer_norm`."""
    total_gradient_TH, gamma_gradient_H, beta_gradient_H = _layer_norm_backward(gradient_TH, normal_TH, scale_T1, gamma_H)
    return _apply_dropout(total_gradient_TH, dropout_draw, rate), total_gradient_TH, gamma_gradient_H, beta_gradient_H


def _apply_dropout(inputs: tf.Tensor, dropout_draw: tf.Tensor | None, rate: float) -> tf.Tensor:
    """Multiply the inputs, or their gradient, by a scaled dropout mask."""
    if dropout_draw is None:
        return inputs
    return inputs * (make_keep_mask(dropout_draw, inputs.shape, rate, inputs.dtype) * compute_keep_scale(dropout_draw, rate))


def _normal_cdf(inputs: tf.Tensor) -> tf.Tensor:
    """Compute Phi(x), the cumulative distribution function of the standard normal distribution."""
    return 0.5 * (1.0 + tf.math.erf(inputs * math.sqrt(0.5)))


def _gelu_forward(inputs: tf.Tensor) -> tf.Tensor:
    """Compute x * Phi(x)."""
    return inputs * _normal_cdf(inputs)


def _gelu_backward(gradient: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
    """Compute the gradient of the GELU function, x * Phi(x)."""
    density = tf.exp(-0.5 * tf.square(inputs)) * (1.0 / math.sqrt(2.0 * math.pi))
    return gradient * (_normal_cdf(inputs) + inputs * density)


# --- Dropout without state
#
# Which elements are dropped depends only on a seed, so that a resumed run is bit-identical. There are two methods:
#
# - Without compilation, TensorFlow's counter-based Philox generator (Salmon et al., 2011) is used, with only 16 bits per
#   element, because random numbers are most of the cost of dropout on a CPU. The mask is stored for the backward pass.
# - In compiled kernels, the index of an element and the seed are hashed with two rounds of MurmurHash3's finalizer (Appleby,
#   2011). This needs no pass over memory. The backward pass computes the hash again, so no mask is stored.
#
# Both methods round the dropout rate to a multiple of 1 / 65,536, and scale the remaining elements by exactly this rate.

# Each dropout has its own seed, which is the seed of the forward pass plus a multiple of this constant. The constant is 2^32
# divided by the golden ratio, which keeps the seeds far apart (Knuth, TAOCP 3, 6.4). It is rounded to an odd number, and
# written as a signed 32-bit integer.
_GOLDEN_STRIDE = 0x9E3779B1 - (1 << 32)
_FIRST_FACTOR, _SECOND_FACTOR = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)
_DROPOUT_STEPS = 1 << 16


def make_keep_mask(dropout_draw: tf.Tensor, shape: tf.TensorShape, rate: float, dtype: tf.DType) -> tf.Tensor:
    """Return a dropout mask, which is 1 for elements that are kept, and 0 for elements that are dropped.

    Args:
        dropout_draw: The result of `ForwardPass.draw_dropout`: the mask itself as bools or, in compiled kernels, a seed,
            int32 [2].
        shape: The shape of the mask.
        rate: The fraction of elements that is dropped.
        dtype: The dtype of the mask.
    """
    if dropout_draw.dtype != tf.int32:
        return tf.cast(dropout_draw, dtype)
    # If the seed were added to the index of an element, consecutive seeds would give the same mask, shifted by one element.
    # Therefore first hash the seed to two keys.
    elements = tf.reshape(tf.range(shape.num_elements(), dtype=tf.int32), shape)
    first_key = _murmur_finalize(dropout_draw[0] + _murmur_finalize(dropout_draw[1]))
    second_key = _murmur_finalize(dropout_draw[1] + _murmur_finalize(first_key + _GOLDEN_STRIDE))
    hashed = _murmur_finalize(_murmur_finalize(tf.bitwise.bitwise_xor(elements, first_key)) + second_key)
    return tf.cast(hashed >= _compute_keep_threshold(rate), dtype)


def compute_keep_scale(dropout_draw: tf.Tensor | None, rate: float) -> float:
    """Return the factor that kept elements are multiplied by, so that dropout does not change the mean. Without dropout,
    return 1.
    """
    return 1.0 if dropout_draw is None else _DROPOUT_STEPS / (_DROPOUT_STEPS - _quantize_dropout_rate(rate))


def _murmur_finalize(words: tf.Tensor) -> tf.Tensor:
    """Apply the finalizer of the hash function MurmurHash3 to int32 words.

    Products wrap around, and shifts are logical.
    """
    words = tf.bitwise.bitwise_xor(words, _shift_right_logically(words, 16)) * _FIRST_FACTOR
    words = tf.bitwise.bitwise_xor(words, _shift_right_logically(words, 13)) * _SECOND_FACTOR
    return tf.bitwise.bitwise_xor(words, _shift_right_logically(words, 16))


def _shift_right_logically(words: tf.Tensor, bits: int) -> tf.Tensor:
    """Shift int32 words to the right, and fill the free bits with zeros instead of copies of the sign."""
    return tf.bitwise.bitwise_and(tf.bitwise.right_shift(words, bits), (1 << (32 - bits)) - 1)


def _quantize_dropout_rate(dropout_rate: float) -> int:
    """Return the dropout rate as a multiple of 1 / 65,536, rounded to an integer of at least 1."""
    return max(1, round(dropout_rate * _DROPOUT_STEPS))


def _compute_keep_threshold(rate: float) -> int:
    """Return the threshold for random int32 numbers. An element is kept if its random number is at least this threshold."""
    return _wrap_to_int32((_quantize_dropout_rate(rate) << 16) - (1 << 31))


def _wrap_to_int32(value: int) -> int:
    """Return the signed 32-bit integer that equals `value` modulo 2^32."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


@dataclass(frozen=True)
class ForwardPass:
    """The options of a forward pass, which are its dropout seed and whether XLA compiles its kernels.

    Attributes:
        dropout_seed: The seed, int32 [2], or None for no dropout.
        compiled: Whether XLA compiles kernels.
    """

    dropout_seed: tf.Tensor | None = None
    compiled: bool = False

    def draw_dropout(self, shape: tf.TensorShape, rate: float, site: int) -> tf.Tensor | None:
        """Draw the random numbers for one of the dropout operations in the model.

        Args:
            shape: The shape of the tensor whose elements are dropped.
            rate: The fraction of elements that is dropped.
            site: The number of the dropout in the model.

        Returns:
            The `dropout_draw` argument of `make_keep_mask`, or None if nothing is dropped.
        """
        if self.dropout_seed is None or rate == 0:
            return None
        seed_2 = self.dropout_seed + tf.constant([_wrap_to_int32(site * _GOLDEN_STRIDE), 0], dtype=tf.int32)
        if self.compiled:
            return seed_2
        # Drawing random numbers is slow, and 16 bits per element are sufficient. Therefore use each 32-bit word for two
        # elements. For the second element, shift the lower half of the word up.
        elements = shape.num_elements()
        words = tf.random.stateless_uniform([(elements + 1) // 2], seed_2, minval=None, maxval=None, dtype=tf.int32)
        noise = tf.concat([words, tf.bitwise.left_shift(words, 16)], axis=0)[:elements]
        return tf.reshape(noise >= _compute_keep_threshold(rate), shape)
