"""CRC-32C by both ways, against a slow twin."""

from __future__ import annotations

import numpy as np
import pytest

import tests.oracles.wire as naive
from gaudi_bert.common import crc32c as engine

WAYS = [engine.TABLE_CRC_FUNCTIONS, *([engine.HARDWARE_CRC_FUNCTIONS] if engine.HAS_CRC_INSTRUCTIONS else [])]


SIZES = [*range(60), 95, 96, 97, 1000, 12_287, 12_288, 12_289, 25_000]


def test_the_published_check_value() -> None:
    assert engine.crc32c(b"123456789") == 0xE3069283
    assert engine.crc32c(b"") == 0
    assert engine.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, appendix B.4


@pytest.mark.parametrize("size", SIZES)
def test_kernels_against_the_twin(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size + 3).astype(np.uint8)[3:]  # not aligned
    expected = naive.crc32c(data.tobytes())
    assert engine.crc32c(data) == expected
    for run, _, _ in WAYS:
        assert run(data.ctypes.data, size, 0) == expected
    for cut in {0, size // 3, size // 2, size}:
        first, second = engine.crc32c(data[:cut]), engine.crc32c(data[cut:])
        assert engine.crc32c(data[cut:], first) == expected
        for _, append, _ in WAYS:
            assert append(first, size - cut, second) == expected


def test_a_word_and_the_masked_form() -> None:
    for value in (0, 1, 255, 2**31, 2**40 + 12345, 2**62):
        data = value.to_bytes(8, "little")
        assert {of_word(value) for _, _, of_word in WAYS} == {naive.crc32c(data)}
        masked = engine.masked_crc32c(engine.crc32c(data))
        assert masked.to_bytes(4, "little") == naive.masked_crc(data)
        assert engine.mask_crc.py_func(engine.crc32c(data)) == masked
