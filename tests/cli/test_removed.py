"""What earlier versions had is refused in one line that states what to do instead, and so is nothing else."""

from __future__ import annotations

import pytest

from tests.builders.command_line import run_command

REMOVED = {
    "compare lengths.npy": "compare was removed: `gaudi-bert estimate SOURCE` prints our packs and the proven minimum,",
    "help compare": "compare was removed: `gaudi-bert estimate SOURCE` prints our packs and the proven minimum,",
    "train --data records --out out --on-the-fly plan.json": "train --on-the-fly was removed: pack the records first, with",
    "pack t.parquet --out o --keep-together talk": "pack --keep-together was removed: join the rows that belong together",
    "write r --plan p.json --out o --parquet": "write --parquet was removed: write the packs first, then `gaudi-bert",
    "write r --plan p.json --predecessor-metadata": "write --predecessor-metadata was removed: write the packs first, then",
    "train --on-the-fly=plan.json": "train --on-the-fly was removed: pack the records first, with",
}


@pytest.mark.parametrize("words", REMOVED)
def test_what_was_removed_is_refused_with_what_to_do_instead(words: str) -> None:
    done = run_command(*words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {REMOVED[words]}")
    assert done.stderr.count("\n") == 1


def test_what_never_was_is_refused_as_before() -> None:
    assert "No such option: --on-the-fly" in run_command("evaluate", "--on-the-fly", "plan.json").stderr
    assert "No such command 'conjure'" in run_command("conjure").stderr
