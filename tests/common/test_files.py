"""Files are complete or absent, also when the writer is killed, the disk is full, or two writers meet; and YAML in them."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import (
    atomic_file,
    check_regular_file,
    exclusive_lock,
    explain_os_errors,
    fingerprint_file,
    open_file,
    read_file,
    read_json,
    read_text,
    write_json,
    write_text,
)
from tests.builders.command_line import inside
from tests.builders.unreadable import open_folder, unreadable


def test_a_file_appears_whole_or_what_was_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.bin"
    with atomic_file(path) as handle:
        handle.write(b"abc")
        assert not path.exists()
    with pytest.raises(RuntimeError), atomic_file(path) as handle:
        handle.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"abc"
    assert list(path.parent.iterdir()) == [path]


def test_a_killed_writer_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    code = f"""
from pathlib import Path; import sys, time
from gaudi_bert.common.files import atomic_file
with atomic_file(Path({str(path)!r})) as handle:
    handle.write(b"half"); handle.flush(); print("ready", flush=True)
    for _ in range(1200): time.sleep(0.05)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        os.kill(writer.pid, signal.SIGKILL)
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_a_file_has_its_name_only_when_its_bytes_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, flush, rename = [], os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        done.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir(), os.fstat(descriptor).st_size))
        flush(descriptor)

    def renamed(*paths: Path) -> None:
        done.append("named")
        rename(*paths)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    write_text(tmp_path / "a.txt", "abc")
    assert done[:2] == [(False, 3), "named"]
    assert [is_folder for is_folder, _ in done[2:]] == [True]


def test_a_full_disk_and_a_folder_that_cannot_be_made_are_one_line(tmp_path: Path) -> None:
    full = Path("/dev/full")
    with pytest.raises(FailedError, match="free some space"), explain_os_errors(full, "write"):
        full.write_bytes(b"x")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/a\.txt: cannot write: Not a directory; check the path"):
        write_text(tmp_path / "file" / "a.txt", "x")


def test_json_refuses_what_json_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"value": float("nan")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("content", "problem"), [(b"", "not valid JSON"), (b"[" * 9999, "too deeply"), (b"\xff", "byte 0")])
def test_what_is_not_json_is_refused_with_its_name(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(InputError, match=rf"a\.json: .*{problem}"):
        read_json(tmp_path / "a.json")


def test_a_lock_keeps_a_second_writer_out_and_dies_with_its_process(tmp_path: Path) -> None:
    target = tmp_path / "group-00000.json"
    code = f"""
from pathlib import Path; import time
from gaudi_bert.common.files import exclusive_lock
with exclusive_lock(Path({str(target)!r}), "group 0"):
    print("locked", flush=True)
    for _ in range(1200): time.sleep(0.05)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        named = f"group 0: process {holder.pid} on .* is writing"
        with pytest.raises(FailedError, match=named), exclusive_lock(target, "group 0"):
            pass
        os.kill(holder.pid, signal.SIGKILL)
    for _ in range(50):
        try:
            with exclusive_lock(target, "group 0"):
                return
        except FailedError:
            time.sleep(0.1)
    pytest.fail("the lock outlived its process")


def test_processes_that_write_the_same_file_take_turns(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gaudi_bert.common.files import write_text\n"
        "for number in range(60): write_text(Path(sys.argv[1]), sys.argv[2] * 5000)"
    )
    target = tmp_path / "settings.json"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(target), letter]) for letter in "abc"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    assert target.read_text() in {letter * 5000 for letter in "abc"}
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


# --- nothing is written through a link, nor over a file of somebody else


@pytest.mark.parametrize("there", [True, False], ids=["link to a file", "dangling link"])
def test_no_link_is_followed_when_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    if there:
        victim.write_text("precious")
    out.mkdir()
    guessed = iter(["00000000", "11111111"])
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(guessed))
    for link in [out / name for name in (".a.txt.tmp", ".a.txt.00000000.tmp", "a.txt")]:
        link.symlink_to(victim)
    write_text(out / "a.txt", "mine")
    assert (out / "a.txt").read_text() == "mine"
    assert not (out / "a.txt").is_symlink()
    assert victim.exists() == there
    assert not there or victim.read_text() == "precious"


@pytest.mark.parametrize("make", ["symlink_to", "hardlink_to"])
@pytest.mark.parametrize("content", ["precious", "p" * 1000])
def test_a_lock_spoils_no_other_file(tmp_path: Path, make: str, content: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text(content)
    getattr(tmp_path / ".a.json.lock", make)(victim)
    with pytest.raises(InputError, match=r"\.a\.json\.lock: .*(links|remove it)$"), exclusive_lock(tmp_path / "a.json", "a"):
        pass
    assert victim.read_text() == content


def test_a_lock_names_nobody_when_it_is_over(tmp_path: Path) -> None:
    for _ in range(2):
        with exclusive_lock(tmp_path / "a.json", "a"):
            assert f"process {os.getpid()} on " in (tmp_path / ".a.json.lock").read_text()
        assert not (tmp_path / ".a.json.lock").read_text().strip()


# --- files for reading have an end


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to a pipe"])
def test_what_has_no_end_is_no_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as server, inside(tmp_path):  # the names of sockets are short
            server.bind("x")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to("pipe")
    for read in (open_file, read_file, read_text, read_json, check_regular_file):
        with pytest.raises(InputError, match=rf"^{path}: the path is a {kind.split()[-1]}; "):
            read(path)
    with pytest.raises(InputError, match="is a"):
        write_text(path, "x")
    assert not list(tmp_path.glob(".*"))


def test_a_loop_of_links_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for path in (tmp_path / "a", tmp_path / "a" / "x.json"):
        with pytest.raises(InputError, match=r"fix the symbolic links"):
            write_text(path, "x")


@pytest.mark.parametrize("name", ["a\0b", "a\ud800"])
def test_what_is_no_path_is_named(tmp_path: Path, name: str) -> None:
    for use in (read_json, lambda path: write_text(path, "x")):
        with pytest.raises(InputError, match="the path contains"):
            use(tmp_path / name)
    with pytest.raises(InputError, match=r"the file name .*b\\udcff\.jsonl.*, because it is not valid UTF-8"):
        write_text(tmp_path / "x", '{"inputs": {"b\udcff.jsonl": "57"}}')


def test_a_file_without_permission_is_not_missing() -> None:
    with open_folder() as folder:
        path = folder / "x"
        path.write_text("a")
        with unreadable(path), pytest.raises(InputError, match="x: cannot read: Permission denied"):
            fingerprint_file(path)
        assert fingerprint_file(path).startswith("x:")
