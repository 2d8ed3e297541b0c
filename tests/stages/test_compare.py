"""Everybody's packers on the same lengths, from every kind of source."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_bert.packing.histogram import histogram_of
from gaudi_bert.packing.peers import PEERS, ListedLengths
from tests.builders.agree import agree
from tests.builders.command_line import run_command

LENGTHS = np.random.default_rng(5).integers(3, 97, 2411)


@pytest.fixture(scope="module")
def npy(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("compare") / "lengths.npy"
    np.save(path, LENGTHS)
    return str(path)


@pytest.fixture(scope="module")
def found(npy: str):
    done = run_command("compare", npy, "--json", "--picture", npy.replace(".npy", ".svg"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_packer_has_a_row_beside_the_proven_bound(found) -> None:
    rows = {(row["tool"], row["algorithm"]): row for row in found["rows"]}
    assert set(rows) == {("gaudi-bert", name) for name in ("optimal", "nnls", "lpfhp")} | {
        (peer.tool, peer.algorithm) for peer in PEERS
    }
    assert (found["sequences"], found["tokens"], found["order"]) == (2411, int(LENGTHS.sum()), "as given")
    assert found["max_sequence_length"] == LENGTHS.max()
    for row in rows.values():
        assert row["gap"] == row["packs"] - found["lower_bound"] >= 0
        agree(row["gap_share"], row["gap"] / found["lower_bound"])
        agree(row["efficiency"], LENGTHS.sum() / (row["packs"] * LENGTHS.max()))
    assert [row["packs"] for row in found["rows"]] == sorted(row["packs"] for row in found["rows"])
    assert rows["gaudi-bert", "optimal"]["gap"] == 0
    assert {rows["gaudi-bert", "lpfhp"]["packs"]} == {rows["seqpacker", "obfd"]["packs"]}
    called = {row["tool"] for row in found["rows"] if row["made_by"] == "package"}
    assert called == ({"trl"} if importlib.util.find_spec("trl") else set())
    picture = Path(found["picture"]).read_text(encoding="utf-8")
    assert all(f"{row['tool']} {row['algorithm']}" in picture for row in found["rows"])


def test_text_and_parquet_have_the_figures_of_the_array(tmp_path, found) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    text = tmp_path / "lengths.txt"
    text.write_text("\n".join(map(str, LENGTHS)) + "\n")
    lists = [[0] * length for length in LENGTHS]
    parquet.write_table(pyarrow.table({"input_ids": lists, "size": LENGTHS}), tmp_path / "rows.parquet", row_group_size=999)
    table = tmp_path / "rows.parquet"
    for source in (text, table, f"{table}:input_ids", f"{table}:size"):
        done = run_command("compare", source, "--json")
        assert done.returncode == 0, done.stderr
        other = json.loads(done.stdout)
        for name in ("sequences", "tokens", "max_sequence_length", "lower_bound", "order"):
            assert other[name] == found[name]
        assert [row["packs"] for row in other["rows"]] == [row["packs"] for row in found["rows"]]


def test_a_histogram_is_shuffled_and_packed_to_the_same_bound(tmp_path, found) -> None:
    slots = found["max_sequence_length"]
    counts = histogram_of(LENGTHS, slots).counts.tolist()
    (tmp_path / "histogram.json").write_text(json.dumps({"max_sequence_length": slots, "counts": counts}))
    other = json.loads(run_command("compare", tmp_path / "histogram.json", "--json").stdout)
    assert other["order"] == "shuffled"
    assert other["lower_bound"] == found["lower_bound"]


def test_a_depth_holds_for_everybody(npy: str) -> None:
    result = json.loads(run_command("compare", npy, "--depth", "2", "--max-sequence-length", "200", "--json").stdout)
    assert (result["depth"], result["max_sequence_length"]) == (2, 200)
    assert min(row["packs"] for row in result["rows"]) >= -(-2411 // 2)


def test_the_table_for_people(npy: str) -> None:
    lines = run_command("compare", npy).stdout.splitlines()
    assert lines[0].startswith(f"{npy}: 2,411 sequences, ")
    assert lines[1].startswith("Packs of 96 slots and any number of sequences; any packing needs ")
    assert sum("stand-in" in line for line in lines) >= len(PEERS) - 1


# The file, what is in it, and what the one line of the error must name.
def saved(save: Callable[..., None], values: Any = (3, 4, 5)) -> bytes:
    """The bytes of a file that numpy saves."""
    content = io.BytesIO()
    save(content, np.asarray(values))
    return content.getvalue()


BAD = {
    "a word in a text": ("x.txt", b"3\n4\nfive\n", "x.txt: line 3: 'five' is not a length;"),
    "an empty line": ("x.txt", b"3\n\n5\n", "x.txt: line 2: '' is not a length;"),
    "an empty text": ("x.txt", b"", "x.txt: line 1: '' is not a length;"),
    "a zero": ("x.txt", b"3\n0\n", "x.txt: lengths[1] is 0;"),
    "too large a number": ("x.txt", b"3\n99999999999999999999\n", "x.txt: line 2: '99999999999999999999' is not a length;"),
    "no array": ("x.npy", b"no array", "x.npy: cannot be read as .npy"),
    "digits of another script": ("x.txt", "3\n\u0661\n".encode(), "x.txt: line 2: '\u0661' is not a length;"),
    "digits in groups": ("x.txt", b"3\n1_0\n", "x.txt: line 2: '1_0' is not a length;"),
    "five thousand digits": ("x.txt", b"3\n" + b"9" * 5000, "x.txt: line 2: '9999"),
    "an archive": ("x.npy", saved(np.savez), "x.npy: cannot be read as .npy: it is of another format"),
    "more than there is": ("x.npy", saved(np.save).replace(b"(3,)", b"(9,)"), "x.npy: cannot be read as .npy: mmap length"),
    "beyond all memory": (
        "x.npy",
        saved(np.save).replace(b"(3,), }" + b" " * 30, b"(1" + b"0" * 30 + b",), }" + b" " * 2),
        "x.npy: cannot be read as .npy",
    ),
    "objects": ("x.npy", saved(np.save, np.array([1, None])), "x.npy: cannot be read as .npy"),
    "no table": ("x.parquet", b"no table", "x.parquet: cannot be read as a Parquet"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_line(tmp_path, case: str) -> None:
    name, content, words = BAD[case]
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    done = run_command("compare", tmp_path / name)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_bad_array_is_one_line(tmp_path) -> None:
    """What is bad is in tests/packing/test_histogram.py."""
    np.save(tmp_path / "x.npy", np.array([3.0, np.nan]))
    done = run_command("compare", tmp_path / "x.npy")
    assert done.returncode == 2
    assert "lengths[1] is nan," in done.stderr


def test_bad_columns_are_one_line(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"text": ["a"] * 3, "size": pyarrow.array([1, 2, None]), "share": [0.5] * 3})
    parquet.write_table(table, tmp_path / "x.parquet")
    for column, words in {
        "": "has no column input_ids; it has text, size, share: write FILE:COLUMN",
        ":text": "row 0: text is of type string;",
        ":size": "row 2: size is null;",
        ":share": "row 0: share is of type double;",
    }.items():
        done = run_command("compare", f"{tmp_path / 'x.parquet'}{column}")
        assert done.returncode == 2
        assert words in done.stderr


def test_other_bad_usage(npy: str, tmp_path) -> None:
    for arguments, words in (
        ((tmp_path / "missing.npy",), "no such file"),
        ((npy, "--depth", "0"), "depth is 0"),
        ((npy, "--depth", "deep"), "depth is 'deep'"),
        ((npy, "--picture", "x.gif"), "x.gif: a picture is written as .png or .svg"),
        ((npy, "--max-sequence-length", "50"), "longer than max_sequence_length 50"),
        (("wikipedia-513",), "did you mean `wikipedia-512`"),
    ):
        done = run_command("compare", *arguments)
        assert done.returncode == 2
        assert words in done.stderr


def test_the_stand_in_for_trl_has_the_packs_of_trl() -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL IS NOT INSTALLED: pip install trl to hold its stand-in to it")
    lengths = LENGTHS.astype(np.int32)
    listed = ListedLengths(lengths, lengths, histogram_of(lengths, 101), 101)
    (peer,) = (peer for peer in PEERS if peer.tool == "trl")
    assert peer.callable_for(listed)
    assert peer.installed is not None
    assert peer.installed(listed) == peer.count(listed)
