"""`verify --shard` and `--finish` as they are typed: what is printed, exit codes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

from tests.builders.command_line import refusal, run_command, succeed
from tests.builders.packing_case import make_case


def test_what_parts_print_and_how_they_end(tmp_path: Path) -> None:
    case = make_case(tmp_path, files=6)
    verify = ("verify", case.records, case.packed)
    part = succeed(*verify, "--shard", "0/2").stdout
    assert part.startswith("2 groups: ")
    assert part.endswith(" packs, each exactly once; --finish completes the proof when all parts are done\n")
    assert "(all were verified already, nothing to do)" in succeed(*verify, "--shard", "0/2").stdout
    assert succeed(*verify, "--shard", "5/7").stdout == "nothing to do: there are fewer groups than parts\n"
    early = run_command(*verify, "--finish")
    assert (early.returncode, early.stdout) == (1, "")
    assert "1 of 3 groups are not verified: group 1 has no proof; run `gaudi-bert verify --shard K/N`" in early.stderr
    shown = json.loads(succeed(*verify, "--shard", "1/2", "--json").stdout)
    assert (shown["groups"], shown["groups_written"]) == (1, 1)
    whole = succeed(*verify, "--finish").stdout.splitlines()
    assert whole == [
        f"every one of {len(case.sequences)} sequences is in the packs exactly once",
        f"Next: gaudi-bert train --data {case.packed} --out run/",
    ]
    assert succeed(*verify, "--quiet").stdout.splitlines() == [f"{whole[0]} (already there, nothing to do)"]
    assert "already there, nothing to do" in succeed(*verify, "--shard", "1/2").stdout


def test_options_that_exclude_each_other(tmp_path: Path) -> None:
    assert "--finish and --shard exclude each other" in refusal("verify", "r", tmp_path, "--finish", "--shard", "0/2")
    assert "--finish and --overwrite exclude each other; verify the parts again with --shard K/N --overwrite" in refusal(
        "verify", "r", tmp_path, "--finish", "--overwrite"
    )
