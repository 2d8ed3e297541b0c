from __future__ import annotations

from gaudi_bert.common.errors import shortened, shown


def test_long_texts_keep_their_ends() -> None:
    assert shortened("a  b\nc") == "a b c"
    line = shortened("first" + "x" * 5_000_000 + "last", 100)
    assert len(line) <= 100
    assert line.startswith("first")
    assert line.endswith("last")


def test_any_value_is_shown_shortly() -> None:
    deep: list[object] = []
    for _ in range(10_000):
        deep = [deep, deep]
    assert shown(3) == "3"
    assert shown("a") == "'a'"
    assert shown(1 << 24_000) == "a number of 24,001 bits"
    assert len(shown(deep)) <= 80
    assert len(shown({"x" * 1_000_000: "y" * 1_000_000})) <= 80
