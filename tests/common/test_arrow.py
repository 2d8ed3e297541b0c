"""What comes out of a damaged Arrow file is proven sound before it is used: no byte of foreign memory is packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pyarrow = pytest.importorskip("pyarrow", exc_type=ImportError)

from gaudi_bert.common.errors import InputError  # noqa: E402
from gaudi_bert.config.sections import TableSettings  # noqa: E402
from gaudi_bert.tables.import_tables import import_tables  # noqa: E402
from gaudi_bert.tables.pack import pack_table  # noqa: E402
from tests.builders import tables  # noqa: E402
from tests.builders.reporters import QUIET  # noqa: E402

ROWS = [
    {"input_ids": [11, 12, 13], "labels": [21, 22, 23], "name": "abcde"},
    {"input_ids": [14], "labels": [24], "name": "fg"},
]
Run = Callable[[Path, Path], None]
TEXT_OFFSETS, LIST_OFFSETS = (0, 5, 7), (0, 3, 4)


def damage(path: Path, offsets: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Put other int32 offsets where these are."""
    before, after = (np.array(values, np.int32).tobytes() for values in (offsets, other))
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after))


def packed(source: Path, out: Path) -> None:
    pack_table(source, out, TableSettings(max_sequence_length=8, shard_multiple=1), reporter=QUIET, verified=True)


def imported(source: Path, out: Path) -> None:
    import_tables(source, out, reporter=QUIET)


@pytest.mark.parametrize("write", [tables.write_file, tables.write_stream])
@pytest.mark.parametrize(
    ("run", "offsets", "other"),
    [
        (packed, TEXT_OFFSETS, (0, 5, 395)),
        (packed, TEXT_OFFSETS, (0, 2**30, 7)),
        (packed, TEXT_OFFSETS, (-400, 5, 7)),
        (packed, LIST_OFFSETS, (0, 3, 2**30)),
        (packed, LIST_OFFSETS, (0, -3, 4)),
        (imported, LIST_OFFSETS, (0, 3, 2**30)),
        (imported, LIST_OFFSETS, (0, 2**31 - 1, 4)),
    ],
)
def test_offsets_that_lead_out_of_the_file(
    tmp_path: Path,
    write: Callable[..., None],
    run: Callable[[Path, Path], None],
    offsets: tuple[int, ...],
    other: tuple[int, ...],
) -> None:
    write(tmp_path / "rows.arrow", ROWS)
    damage(tmp_path / "rows.arrow", offsets, other)
    with pytest.raises(InputError, match=r"rows[.]arrow: cannot be read as a Parquet or Arrow table: .*; write it again"):
        run(tmp_path / "rows.arrow", tmp_path / "out")
    assert not list(tmp_path.glob("out/*.*"))


@pytest.mark.parametrize("run", [packed, imported])
@pytest.mark.parametrize("name", ["rows.arrow", "rows.parquet"])
def test_names_of_columns_that_are_not_utf_8(tmp_path: Path, run: Run, name: str) -> None:
    rows = [{**row, "a_long_name": 7} for row in ROWS]
    (tables.write_parquet if name.endswith("parquet") else tables.write_stream)(tmp_path / name, rows)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content.replace(b"a_long_name", b"a_\xff\xfeng_name"))
    with pytest.raises(InputError, match=r"cannot be read as a Parquet or Arrow table"):
        run(tmp_path / name, tmp_path / "out")
    assert not list(tmp_path.glob("out/*.*"))


@pytest.mark.parametrize("name", ["rows.arrow", "rows.parquet"])
def test_text_that_is_not_utf_8(tmp_path: Path, name: str) -> None:
    (tables.write_parquet if name.endswith("parquet") else tables.write_stream)(tmp_path / name, ROWS)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content.replace(b"abcde", b"ab\xffde"))
    with pytest.raises(InputError, match="Invalid UTF8"):
        packed(tmp_path / name, tmp_path / "out")
    assert not list(tmp_path.glob("out/*.*"))
