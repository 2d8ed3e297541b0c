"""The two ways in which tests compare numbers that were computed: to a bound, or to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np

SMALLEST_SCALE = 1e-3


def agree(actual: Any, expected: Any, relative: float = 1e-6, scale: float | None = None) -> None:
    """Fail unless two numbers, arrays, or (nested) dictionaries and lists of them agree to a bound.

    For two different computations: the order of additions differs between processors and between shapes, so they need not
    agree to the last digit. The bound is `relative` times a scale that cannot vanish: the largest magnitude expected (of an
    array, over all its elements), and at least 1e-3; or `scale`, where the numbers are differences of larger ones.
    """
    __tracebackhide__ = True
    _agree(actual, expected, relative, scale, "")


def identical(actual: Any, expected: Any) -> None:
    """Fail unless both are equal to the last bit: one computation run twice, or a copy. Never two different computations."""
    __tracebackhide__ = True
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), f"{sorted(actual)} and {sorted(expected)}"
        for name, value in expected.items():
            identical(actual[name], value)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(actual, expected, strict=True)
    else:
        assert actual == expected, f"{actual!r} and {expected!r}"


def agree_with_gradients(ours: Any, theirs: Any, *inputs: Any, relative: float = 1e-5) -> None:
    """Fail unless two PyTorch functions agree in their outputs, and in the gradients of the inputs that require one.

    The loss is the sum of the outputs, each multiplied by a random number.
    """
    __tracebackhide__ = True
    import torch

    results = []
    for function in (ours, theirs):
        outputs = function(*inputs)
        weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1))
        trained = [each for each in inputs if each.requires_grad]
        gradients = torch.autograd.grad((outputs * weights).sum(), trained)
        results.append({number: each.detach().numpy() for number, each in enumerate((outputs, *gradients))})
    _agree(*results, relative, None, "")


def _agree(actual: Any, expected: Any, relative: float, scale: float | None, where: str) -> None:
    __tracebackhide__ = True
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), f"{where or 'keys'}: {sorted(actual)} and {sorted(expected)}"
        for name, value in expected.items():
            _agree(actual[name], value, relative, scale, f"{where}[{name!r}]")
        return
    if isinstance(expected, (list, tuple)) and any(isinstance(value, (dict, list, tuple, str)) for value in expected):
        assert len(actual) == len(expected), f"{where or 'length'}: {len(actual)} and {len(expected)}"
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            _agree(one, other, relative, scale, f"{where}[{number}]")
        return
    if expected is None or isinstance(expected, (str, bool)):
        assert actual == expected, f"{where}: {actual!r} and {expected!r}"
        return
    expected_values, actual_values = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    assert actual_values.shape == expected_values.shape, f"{where}: {actual_values.shape} and {expected_values.shape}"
    largest = float(np.max(np.abs(expected_values), initial=0.0))
    bound = relative * (scale if scale is not None else max(largest, SMALLEST_SCALE))
    difference = float(np.max(np.abs(actual_values - expected_values), initial=0.0))
    message = f"{where} differ by {difference:.3g}, the bound is {bound:.3g} (largest expected {largest:.3g})"
    assert difference <= bound, message.strip()
