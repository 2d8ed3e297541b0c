"""The door to stores: what goes up and when, what comes down, and what a kill, a second writer or a change leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gaudi_bert.artefacts.mirrored_folder import (
    _create_scratch_folder,
    download_missing_files,
    format_path,
    is_mirrored,
    list_files,
    list_names,
    mirror_folder,
    open_local_copies,
    open_local_copy,
    prefetch_batches,
    remove_files,
    remove_local_copies,
    upload_changed_files,
)
from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import atomic_file, write_json, write_text
from tests.builders.s3_server import ENVIRONMENT, ROOT, S3Server, contents, faulty_proxy, quick

URL = "s3://bucket/door"


def test_each_file_is_up_when_it_is_whole_and_the_manifest_last(s3: S3Server, tmp_path: Path) -> None:
    store, url = quick(s3.endpoint, scratch=str(tmp_path)), f"{URL}/order.v2"
    objects = ObjectStore(store)
    with mirror_folder(Path(url), store) as folder:
        assert is_mirrored(folder / "shards" / "0")
        assert format_path(folder / "shards" / "0") == f"{url}/shards/0"
        for number in range(3):
            with atomic_file(folder / "shards" / str(number)) as handle:
                handle.write(b"half, ")
                handle.flush()
                assert len(contents(url, objects)) == number
                handle.write(b"whole")
            assert contents(url, objects)[f"shards/{number}"] == b"half, whole"
        with pytest.raises(ZeroDivisionError), atomic_file(folder / "shards" / "3") as handle:
            handle.write(b"%d" % (1 // 0))
        write_text(folder / ".progress", "of this machine")
        write_json(folder / "manifest.json", ["0", "1", "2"])
    assert sorted(contents(url, objects)) == ["manifest.json", "shards/0", "shards/1", "shards/2"]
    assert list(tmp_path.iterdir()) == [], "scratch is left"


def test_growing_files_go_up_when_they_are_published_and_only_if_they_grew(s3: S3Server) -> None:
    url = f"{URL}/growing"
    with faulty_proxy(s3.port) as counting:
        store = quick(counting.endpoint)
        with mirror_folder(Path(url), store) as folder:
            write_text(folder / "settings.json", "{}")
            lines, board = folder / "metrics.jsonl", folder / "tensorboard" / "events"
            board.parent.mkdir()
            board.write_text("one")
            for number in range(2):
                with lines.open("a") as handle:
                    handle.write(f"{number}\n")
                assert counting.requests["PUT"] == 1 + 2 * number
                upload_changed_files(folder)
            upload_changed_files(folder)
            assert counting.requests["PUT"] == 4, "settings, lines twice, events once"
    made = contents(url, ObjectStore(quick(s3.endpoint)))
    assert made == {"settings.json": b"{}", "metrics.jsonl": b"0\n1\n", "tensorboard/events": b"one"}
    with mirror_folder(Path(url), quick(s3.endpoint)) as folder:
        download_missing_files(folder / "metrics.jsonl", folder / "none.jsonl")
        assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def test_a_kill_between_two_files_leaves_the_first_and_the_next_run_goes_on(s3: S3Server, tmp_path: Path) -> None:
    url, store = f"{URL}/killed", quick(s3.endpoint, scratch=str(tmp_path))
    program = f"""
import os, signal
from pathlib import Path
from gaudi_bert.artefacts.mirrored_folder import mirror_folder
from gaudi_bert.common.files import atomic_file, write_text
from gaudi_bert.config.places import StoreSettings
with mirror_folder(Path({url!r}), StoreSettings(**{store.model_dump()!r})) as folder:
    write_text(folder / "shard", "whole")
    with atomic_file(folder / "manifest.json") as handle:
        handle.write(b"half")
        handle.flush()
        os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env={**ENVIRONMENT, "PATH": ""}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert contents(url, ObjectStore(store)) == {"shard": b"whole"}
    assert len(list(tmp_path.iterdir())) == 1
    with mirror_folder(Path(url), store) as folder:
        assert [path.parent for path in tmp_path.rglob("shard")] == [], "scratch of the killed process is left"
        download_missing_files(folder / "shard", folder / "manifest.json")
        assert (folder / "shard").read_text() == "whole"
        assert not (folder / "manifest.json").exists()
        write_text(folder / "manifest.json", "whole")
    assert contents(url, ObjectStore(store)) == {"shard": b"whole", "manifest.json": b"whole"}


@pytest.mark.parametrize("names", [("run-a", "run-b"), ("same", "same")])
def test_two_writers_in_one_process_neither_see_each_others_folder_nor_wait(names: tuple[str, str], s3: S3Server) -> None:
    store, both_are_open = quick(s3.endpoint), threading.Barrier(2, timeout=60)

    def run(name: str) -> Path:
        with mirror_folder(Path(f"{URL}/{name}"), store) as folder:
            both_are_open.wait()
            with ThreadPoolExecutor(2) as pool:  # a run's files are also written by threads of its own
                list(pool.map(lambda number: write_text(folder / f"{number}", name), range(3)))
            assert [format_path(folder / "0"), *list_names(folder)] == [f"{URL}/{name}/0", "0", "1", "2"]
            both_are_open.wait()
        return folder

    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(run, names))
    for name, folder in zip(names, folders, strict=True):
        assert contents(f"{URL}/{name}", ObjectStore(store)) == {f"{number}": name.encode() for number in range(3)}
        assert not is_mirrored(folder), "a run's folder ends with its block"


def test_what_is_released_is_in_the_store_and_what_is_removed_is_nowhere(s3: S3Server) -> None:
    url, objects = f"{URL}/released", ObjectStore(quick(s3.endpoint))
    with mirror_folder(Path(url), objects.settings) as folder:
        for name in ("a", "b", "c/d"):
            write_text(folder / name, name)
        remove_local_copies(folder / "a", folder / "b", folder / "none")
        assert not (folder / "a").exists()
        assert list_names(folder) == ["a", "b", "c/d"]
        assert sorted(list_files(folder)) == ["a", "b"]
        download_missing_files(folder / "a")
        assert (folder / "a").read_text() == "a"
        remove_files(folder / "a", folder / "c" / "d", folder / "none")
        assert not (folder / "a").exists()
        assert list_names(folder) == ["b"]
    assert contents(url, objects) == {"b": b"b"}


def test_batches_are_fetched_ahead_once_and_only_as_they_were_listed(s3: S3Server) -> None:
    url, objects = f"{URL}/ahead", ObjectStore(quick(s3.endpoint))
    for number in range(7):
        objects.write(f"{url}/{number}", b"%d" % number)
    with mirror_folder(Path(url), objects.settings) as folder:
        paths = [folder / name for name in list_files(folder)]
        objects.write(f"{url}/6", b"another")
        with prefetch_batches([[path] for path in paths], 2) as batches:
            for number in range(6):
                with batches.keep_batch_local_during(number):
                    assert paths[number].read_text() == str(number)
                assert not paths[number].exists()
            with (
                pytest.raises(InputError, match=f"{url}/6: the object changed while it was read"),
                batches.keep_batch_local_during(6),
            ):
                pass
        absent = pytest.raises(InputError, match=f"{url}/none: the object or its bucket does not exist")
        with absent, prefetch_batches([[folder / "none"]]) as batches, batches.keep_batch_local_during(0):
            pass


def test_a_folder_of_this_machine_is_worked_on_where_it_is(tmp_path: Path) -> None:
    with mirror_folder(tmp_path) as folder:
        assert folder == tmp_path
        write_text(folder / "a", "a")
        (folder / "b").mkdir()
        download_missing_files(folder / "a", folder / "none")
        upload_changed_files(folder)
        remove_local_copies(folder / "a")
        with prefetch_batches([[folder / "a"]]) as batches, batches.keep_batch_local_during(0):
            assert format_path(folder / "a") == str(tmp_path / "a")
        assert list_names(folder) == ["a", "b"]
        assert list_files(folder)["a"].bytes == 1
        remove_files(folder / "a", folder / "b")
    assert list(tmp_path.iterdir()) == []


def test_errors_name_the_url_of_a_local_path(s3: S3Server) -> None:
    with pytest.raises(FailedError, match=f"^{URL}/named/x: not whole$"), mirror_folder(Path(f"{URL}/named")) as folder:
        raise FailedError(f"{folder / 'x'}: not whole")


def test_scratch_that_is_made_while_others_clean_up_stays(tmp_path: Path) -> None:
    """Each command removes the scratch that a killed one left, and may see another's before that has its lock."""

    def make(number: int) -> bool:
        with _create_scratch_folder(str(tmp_path)) as folder:
            write_text(folder / "file", str(number))
            return (folder / "file").read_text() == str(number)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(make, range(800)))
    assert list(tmp_path.iterdir()) == []


# --- copies of what is read at once: an object, a prefix or a pattern


AT = "s3://bucket/copies"


def names_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_an_object_a_prefix_and_a_pattern(s3: S3Server, tmp_path: Path) -> None:
    store = quick(s3.endpoint, scratch=str(tmp_path / "a [place] of*its own"))
    objects = ObjectStore(store)
    for name in ("wiki.v2/a.txt", "wiki.v2/b.md", "wiki.v2/deep/c.txt", "other/d.txt"):
        objects.write(f"{AT}/{name}", name.encode())
    (tmp_path / "here.txt").write_text("here")
    places = (f"{AT}/wiki.v2/a.txt", None, str(tmp_path / "here.txt"), f"{AT}/wiki.v2/*.txt", Path(f"{AT}/other"))
    with open_local_copies(places, store) as (one, nothing, here, pattern, folder):
        assert one.read_bytes() == b"wiki.v2/a.txt"
        assert nothing is None
        assert here == tmp_path / "here.txt"
        assert one in pattern.parent.glob(pattern.name), "two that mean the same object have one copy"
        assert not (one.parent / "b.md").exists()
        assert names_below(folder) == ["d.txt"]
        assert folder.parent == one.parent.parent
    with open_local_copy(f"{AT}/wiki.v2/", store) as folder:
        assert names_below(folder) == ["a.txt", "b.md", "deep/c.txt"]
    assert list((tmp_path / "a [place] of*its own").iterdir()) == [], "scratch is left"


@pytest.mark.parametrize("place", [f"{AT}/none.txt", f"{AT}/none-*", "s3://no-such-bucket/x", "s3://no-such-bucket"])
def test_what_is_not_there_is_named(s3: S3Server, place: str) -> None:
    with pytest.raises(InputError) as caught, open_local_copy(place, quick(s3.endpoint)):
        pass
    assert str(caught.value) == f"{place}: the bucket does not exist or contains no such objects; check the URL"
