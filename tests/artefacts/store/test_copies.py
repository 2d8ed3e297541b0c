"""Copies of what is read as a whole: an object, a prefix or a pattern; they lie to one another as the objects do."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_bert.artefacts.store.copies import local_copies, local_copy
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import InputError
from tests.builders.s3_server import S3Server, quick

URL = "s3://bucket/copies"


def names_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_an_object_a_prefix_and_a_pattern(s3: S3Server, tmp_path: Path) -> None:
    store = quick(s3.endpoint, scratch=str(tmp_path / "a [place] of*its own"))
    objects = Objects(store)
    for name in ("wiki.v2/a.txt", "wiki.v2/b.md", "wiki.v2/deep/c.txt", "other/d.txt"):
        objects.write(f"{URL}/{name}", name.encode())
    (tmp_path / "here.txt").write_text("here")
    places = (f"{URL}/wiki.v2/a.txt", None, str(tmp_path / "here.txt"), f"{URL}/wiki.v2/*.txt", Path(f"{URL}/other"))
    with local_copies(places, store) as (one, nothing, here, pattern, folder):
        assert one.read_bytes() == b"wiki.v2/a.txt"
        assert nothing is None
        assert here == tmp_path / "here.txt"
        assert one in pattern.parent.glob(pattern.name), "two that mean the same object have one copy"
        assert not (one.parent / "b.md").exists()
        assert names_below(folder) == ["d.txt"]
        assert folder.parent == one.parent.parent
    with local_copy(f"{URL}/wiki.v2/", store) as folder:
        assert names_below(folder) == ["a.txt", "b.md", "deep/c.txt"]
    assert list((tmp_path / "a [place] of*its own").iterdir()) == [], "scratch is left"


@pytest.mark.parametrize("place", [f"{URL}/none.txt", f"{URL}/none-*", "s3://no-such-bucket/x", "s3://no-such-bucket"])
def test_what_is_not_there_is_named(s3: S3Server, place: str) -> None:
    with pytest.raises(InputError) as caught, local_copy(place, quick(s3.endpoint)):
        pass
    assert str(caught.value) == f"{place}: no objects there, or no such bucket; check the URL"
