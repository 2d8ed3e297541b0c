"""YAML that is deep, large, repeats itself, or holds impossible numbers ends in one short line."""

from __future__ import annotations

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.yaml_text import parse_yaml

ALIASES_OF_ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested more than 32 deep"),
        ("{a: " * 40 + "1" + "}" * 40, "nested more than 32 deep"),
        (ALIASES_OF_ALIASES, "more than 10,000 values"),
        ("a: &a [*a]", "holds itself"),
        ("a: " + "9" * 6_000, "not a YAML file"),
        ("a: 2020-13-45", "month must be in 1..12"),
        ("packing: {depth: 3}\nname: x\npacking: {depth: 4}", "`packing` is given twice, in lines 1 and 3"),
        ("packing: {depth: 3, depth: 4}", "`depth` is given twice, in lines 1 and 1"),
        ("x" * 300_000, "300,000 characters; settings have at most 262,144"),
        ("a: b: " + "x" * 200_000, "mapping values are not allowed here"),
        ("a: \x00", "not a YAML file"),
        ("a: !!python/object:os.system x", "line 1, column 4: not valid YAML"),
    ],
)
def test_what_takes_for_ever_or_cannot_be_is_refused_in_a_line(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        parse_yaml(text, "pipeline.yaml")
    assert str(caught.value).startswith("pipeline.yaml: ")
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_aliases_and_merges_work_as_ever() -> None:
    text = "base: &base {x: 1, y: 2}\nmore: &more {<<: *base, y: 3}\nmost: {<<: *more, x: 4}\nlist: [*base, *base]"
    assert parse_yaml(text, "a.yaml") == {
        "base": {"x": 1, "y": 2},
        "more": {"x": 1, "y": 3},
        "most": {"x": 4, "y": 3},
        "list": [{"x": 1, "y": 2}, {"x": 1, "y": 2}],
    }
    assert parse_yaml("", "a.yaml") is None
