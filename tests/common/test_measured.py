from __future__ import annotations

from gaudi_bert.common.measured import measured


def test_a_call_is_measured() -> None:
    found = measured(lambda: bytearray(80_000_017))
    assert len(found.result) == 80_000_017
    assert found.seconds > 0
    assert found.memory_bytes is None or found.memory_bytes > 40_000_000
