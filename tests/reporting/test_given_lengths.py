"""Lengths that a user has already, in every form."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.reporting.estimate import estimate
from tests.builders.reporters import QUIET


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.txt", b"12\n30 7\n511,\n"),
        ("x.json", b" [12, 30, 7, 511]"),
        ("x.csv", b"12\n30\n7\n511\n"),
        ("x.csv", b"id;Length;text\na;12;x\nb;30;y\nc;7;z\nd;511;\n"),
        ("x.tsv", b"tokens\n12\n30\n7\n511\n"),
    ],
)
def test_lengths_of_the_users_own(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    result = estimate(tmp_path / name, depths=["max"], algorithms=["lpfhp"], reporter=QUIET)
    assert (result.sequences, result.tokens, result.max_sequence_length) == (4, 560, 511)
    assert result.rows[0].packs == 2
    longer = estimate(tmp_path / name, depths=["max"], algorithms=["lpfhp"], reporter=QUIET, max_sequence_length=560)
    assert longer.rows[0].packs == 1


def test_an_array_of_lengths(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([12, 30, 7, 511], np.uint16))
    result = estimate(tmp_path / "x.npy", depths=["max"], algorithms=["lpfhp"], reporter=QUIET)
    assert (result.sequences, result.tokens, result.rows[0].packs) == (4, 560, 2)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("x.txt", b"12\nseven\n", "seven"),
        ("x.txt", b"12 0", "length 2 is 0"),
        ("x.json", b"[12, 1.5]", "length 2 is 1.5"),
        ("x.json", b"[[1], [2]]", "2, 1"),
        ("x.csv", b"a,b\n1,2\n", "a, b"),
        ("x.npy", b"nothing", "x.npy"),
    ],
)
def test_what_are_no_lengths(tmp_path: Path, name: str, content: bytes, named: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=re.escape(named)):
        estimate(tmp_path / name, depths=["max"], algorithms=["lpfhp"], reporter=QUIET)


def test_lengths_longer_than_a_pack(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("12 30")
    with pytest.raises(InputError, match="length 2 is 30"):
        estimate(tmp_path / "x.txt", depths=["max"], algorithms=["lpfhp"], reporter=QUIET, max_sequence_length=29)
