from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.corpus.sources import find_sources, source_identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("wiki/AB/wiki_00", "wiki/AA/wiki_01", "wiki/AA/wiki_00", "wiki/.hidden", "one.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["wiki"], ["AA/wiki_00", "AA/wiki_01", "AB/wiki_00"]),
        (["one.txt", "wiki/AB"], ["one.txt", "wiki_00"]),
        (["wiki/A*/wiki_00"], ["AA/wiki_00", "AB/wiki_00"]),
        (["wiki/**/*_01"], ["AA/wiki_01"]),
        (["one.txt", "*.txt", "./one.txt"], ["one.txt"]),
        (["python-docstrings", "one.txt", "python-docs"], ["python-docstrings", "one.txt", "python-docs"]),
    ],
)
def test_files_folders_and_globs_in_a_fixed_order(folder: Path, texts: list[str], names: list[str]) -> None:
    assert [source.name for source in find_sources(texts, folder)] == names


def test_what_is_missing_is_named(folder: Path) -> None:
    (folder / "empty").mkdir()
    for text, message in [("nowhere", "no such file"), ("no*.txt", "no text file"), ("empty", "no text file")]:
        with pytest.raises(InputError, match=message) as caught:
            find_sources([text], folder)
        assert text in str(caught.value)
    with pytest.raises(InputError, match="no text was given"):
        find_sources([], folder)


def test_identity_knows_the_bytes_and_no_path(folder: Path) -> None:
    one, same, other = folder / "one.txt", folder / "copy" / "one.txt", folder / "other" / "one.txt"
    for path, text in ((same, "one.txt"), (other, "one.tyt")):
        path.parent.mkdir()
        path.write_text(text)
    identities = [source_identity(find_sources([str(path)], folder)[0]) for path in (one, same, other)]
    assert identities[0] == identities[1] != identities[2]
    assert identities[0]["bytes"] == 7
