"""Files are whole or absent, also when the writer is killed, the disk is full, or two writers meet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import atomic_file, exclusive_lock, explained_os_errors, read_json, write_json, write_text


def test_a_file_appears_whole(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "deep" / "a.bin") as handle:
        handle.write(b"abc")
        assert not (tmp_path / "deep" / "a.bin").exists()
    assert (tmp_path / "deep" / "a.bin").read_bytes() == b"abc"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.bin"]


def test_an_exception_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError), atomic_file(path) as handle:
        handle.write(b"half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_writer_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    code = f"""
from pathlib import Path; import sys, time
from gaudi_bert.common.files import atomic_file
with atomic_file(Path({str(path)!r})) as handle:
    handle.write(b"half"); handle.flush(); print("ready", flush=True); time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        os.kill(writer.pid, signal.SIGKILL)
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_a_full_disk_is_one_line_with_a_remedy() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    full = Path("/dev/full")
    with pytest.raises(FailedError, match="free some space"), explained_os_errors(full, "write"):
        full.write_bytes(b"x")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FailedError, match=r"file/a\.txt: cannot write"):
        write_text(tmp_path / "file" / "a.txt", "x")


def test_json_refuses_what_json_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"value": float("nan")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "nonsense"])
def test_what_is_not_json_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=r"a\.json: not a JSON file"):
        read_json(tmp_path / "a.json")


def test_a_lock_keeps_a_second_writer_out_and_dies_with_its_process(tmp_path: Path) -> None:
    target = tmp_path / "group-00000.json"
    code = f"""
from pathlib import Path; import time
from gaudi_bert.common.files import exclusive_lock
with exclusive_lock(Path({str(target)!r}), "group 0"):
    print("locked", flush=True); time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        named = f"group 0: process {holder.pid} on .* is writing it; wait for it to end, or stop it"
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
