"""What each process of a launcher does for `test_two_processes.py`: commands of `gaudi-bert`, whole, one after the other.

usage: python -m tests.builders.rank_commands COMMANDS.json OUT   writes OUT/rank-<n>.json: exit code and output of each
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gaudi_bert.common.launch import find_launch
from tests.builders.command_line import run_command


def main() -> None:
    commands, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    launch = find_launch()
    assert launch is not None, "not started by a launcher"
    endings = []
    for command in commands:
        done = run_command(*command)  # a traceback ends this process, and its file shows which command was the last
        endings.append({"code": done.returncode, "stdout": done.stdout, "stderr": done.stderr})
        (out / f"rank-{launch.rank}.json").write_text(json.dumps(endings))
    sys.exit(max(ending["code"] for ending in endings))


if __name__ == "__main__":
    main()
