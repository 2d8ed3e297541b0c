"""BERT for pretraining on one sequence at a time: no packs, no padding, no mask, a loop where there could be a matrix.

The twin that the fast model is held to, written from the papers (Vaswani et al., 2017; Devlin et al., 2019), not from it.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf


def layer_norm(vectors, gamma, beta, epsilon):
    mean, variance = tf.nn.moments(vectors, axes=[-1], keepdims=True)
    return (vectors - mean) / tf.sqrt(variance + epsilon) * gamma + beta


def gelu(x):
    return x * (1 + tf.math.erf(x / np.sqrt(2.0))) / 2


def attend(queries, keys, values, causal):
    """One head of one sequence; a causal query is given its own past and nothing else."""
    contexts = []
    for i in range(queries.shape[0]):
        seen = i + 1 if causal else keys.shape[0]
        scores = tf.linalg.matvec(keys[:seen], queries[i]) / np.sqrt(queries.shape[1])
        contexts.append(tf.linalg.matvec(values[:seen], tf.nn.softmax(scores), transpose_a=True))
    return tf.stack(contexts)


def hidden_states(config, weights, sequence):
    """[length, hidden]"""

    def linear(x, name):
        return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]

    def normal(x, name):
        return layer_norm(x, weights[f"{name}/gamma"], weights[f"{name}/beta"], config.layer_norm_eps)

    x = tf.stack(
        [
            weights["bert/embeddings/word_embeddings"][token]
            + weights["bert/embeddings/token_type_embeddings"][segment]
            + weights["bert/embeddings/position_embeddings"][place]
            for place, (token, segment) in enumerate(zip(sequence.input_ids, sequence.segment_ids, strict=True))
        ]
    )
    x = normal(x, "bert/embeddings/LayerNorm")
    for number in range(config.num_hidden_layers):
        layer = f"bert/encoder/layer_{number}"
        query, key, value = (linear(x, f"{layer}/attention/self/{part}") for part in ("query", "key", "value"))
        size = config.hidden_size // config.num_attention_heads
        heads = [slice(head * size, (head + 1) * size) for head in range(config.num_attention_heads)]
        causal = config.attention == "causal"
        context = tf.concat([attend(query[:, h], key[:, h], value[:, h], causal) for h in heads], axis=1)
        x = normal(linear(context, f"{layer}/attention/output/dense") + x, f"{layer}/attention/output/LayerNorm")
        wide = gelu(linear(x, f"{layer}/intermediate/dense"))
        x = normal(linear(wide, f"{layer}/output/dense") + x, f"{layer}/output/LayerNorm")
    return x


def run(config, weights, sequence):
    """Hidden states [length, H], masked-LM logits [masked, V], next-sentence logits [2] of one sequence."""
    hidden = hidden_states(config, weights, sequence)
    masked = tf.gather(hidden, sequence.masked_positions)
    masked = gelu(
        masked @ weights["cls/predictions/transform/dense/kernel"] + weights["cls/predictions/transform/dense/bias"]
    )
    masked = layer_norm(
        masked,
        weights["cls/predictions/transform/LayerNorm/gamma"],
        weights["cls/predictions/transform/LayerNorm/beta"],
        config.layer_norm_eps,
    )
    words = masked @ tf.transpose(weights["bert/embeddings/word_embeddings"]) + weights["cls/predictions/output_bias"]
    pooled = tf.tanh(hidden[:1] @ weights["bert/pooler/dense/kernel"] + weights["bert/pooler/dense/bias"])
    sentence = tf.linalg.matvec(weights["cls/seq_relationship/output_weights"], pooled[0])
    return hidden, words, sentence + weights["cls/seq_relationship/output_bias"]


def negative_log_likelihoods(logits, labels):
    """One number a row, in the plainest way."""
    return [tf.reduce_logsumexp(row) - row[label] for row, label in zip(logits, labels, strict=True)]


def losses(outputs, sequences, loss):
    """Masked-LM loss (mean over tokens, or over the sequences' own means) and next-sentence loss."""
    per_sequence = [
        negative_log_likelihoods(words, sequence.masked_ids)
        for (_, words, _), sequence in zip(outputs, sequences, strict=True)
    ]
    if loss == "token":
        tokens = [value for values in per_sequence for value in values]
        masked_lm = tf.add_n(tokens) / len(tokens)
    else:
        means = [tf.add_n(values) / len(values) for values in per_sequence if values]
        masked_lm = tf.add_n(means) / len(means)
    sentences = [
        negative_log_likelihoods([logits], [sequence.next_sentence_label])[0]
        for (_, _, logits), sequence in zip(outputs, sequences, strict=True)
    ]
    return masked_lm, tf.add_n(sentences) / len(sentences)


def everything(config, values, sequences, loss):
    """Outputs, losses and gradients (dense, by name) for a list of sequences; `values` are the weights by name."""
    weights = {name: tf.Variable(np.asarray(value), dtype=tf.float64) for name, value in values.items()}
    with tf.GradientTape() as tape:
        outputs = [run(config, weights, sequence) for sequence in sequences]
        masked_lm, next_sentence = losses(outputs, sequences, loss)
        total = masked_lm + next_sentence
    gradients = {name: tf.convert_to_tensor(g).numpy() for name, g in tape.gradient(total, weights).items()}
    return (
        [tuple(part.numpy() for part in output) for output in outputs],
        (float(masked_lm), float(next_sentence)),
        gradients,
    )
