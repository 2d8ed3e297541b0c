"""AdamW and LAMB as their papers write them: one variable after the other, numpy, float64."""

from __future__ import annotations

import numpy as np


def run(kind, values, gradients_of_updates, rates, settings):
    """Values after all updates; `kind` is adamw or lamb; `gradients_of_updates` a list of dictionaries."""
    values = {name: value.astype(np.float64) for name, value in values.items()}
    first = {name: np.zeros_like(value) for name, value in values.items()}
    second = {name: np.zeros_like(value) for name, value in values.items()}
    for number, (gradients, rate) in enumerate(zip(gradients_of_updates, rates, strict=True), start=1):
        for name, gradient in gradients.items():
            first[name] = settings.beta_1 * first[name] + (1 - settings.beta_1) * gradient
            second[name] = settings.beta_2 * second[name] + (1 - settings.beta_2) * gradient**2
            first_hat = first[name] / (1 - settings.beta_1**number)
            second_hat = second[name] / (1 - settings.beta_2**number)
            direction = first_hat / (np.sqrt(second_hat) + settings.epsilon)
            plain = "bias" in name or "LayerNorm" in name
            if not plain:
                direction = direction + settings.weight_decay * values[name]
            ratio = 1.0
            if kind == "lamb" and not (plain and settings.layer_adaptation == "decayed"):
                weight_norm, direction_norm = np.linalg.norm(values[name]), np.linalg.norm(direction)
                if weight_norm > 0 and direction_norm > 0:
                    ratio = weight_norm / direction_norm
            values[name] = values[name] - rate * ratio * direction
    return values
