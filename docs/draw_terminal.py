"""Draw docs/terminal.svg, the recording of the README: commands are run, and their lines appear one after the other.

python docs/draw_terminal.py RECORDS      a folder of unpacked TFRecords, for example work/demo/examples/train
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gaudi_bert.common.files import write_text

COLUMNS = 96
COMMANDS = (
    "gaudi-bert pack my-tfrecords/ --out packed/ --verify",
    "gaudi-bert train --data packed/ --out run/ \\\n    --set training.updates=200 --set training.measure_speedup=true",
)
SECONDS_A_LINE = 0.35


def recorded(command: str, folder: Path) -> list[str]:
    """The lines that a command prints, the most telling of its log."""
    words = [sys.executable, "-m", "gaudi_bert", *shlex.split(command.replace("\\\n", ""))[1:]]
    variables = {**os.environ, "GAUDI_BERT_QUIET": "1"}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=True)
    log = [line for line in done.stderr.splitlines() if re.match(r"train: update \d+/\d+ \(", line)]
    return [*log, *done.stdout.splitlines()]


def draw_terminal(records: Path) -> str:
    """The recording as SVG text."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "my-tfrecords").symlink_to(records.resolve())
        for command in COMMANDS:
            console.print(Text(f"$ {command}", style="bold #8fd3ff"))
            for line in recorded(command, folder):
                shown = Text(line)
                shown.highlight_regex(r"^(Next|Wrote|verified):?", "green")
                console.print(shown)
            console.print()
    svg = console.export_svg(title="gaudi-bert", unique_id="terminal")
    # No font from elsewhere; and each line appears after the one before.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S)
    lines = sorted({int(number) for number in re.findall(r"terminal-line-(\d+)\"", svg)})
    rules = ["@keyframes appear { from { opacity: 0 } to { opacity: 1 } }"]
    rules += [
        f'text[clip-path="url(#terminal-line-{line})"] {{ animation: appear 0.2s {SECONDS_A_LINE * line:.2f}s both }}'
        for line in lines
    ]
    rules.append("@media (prefers-reduced-motion: reduce) { text { animation: none !important } }")
    return svg.replace("</style>", "\n".join(rules) + "\n</style>", 1)


if __name__ == "__main__":
    path = Path(__file__).resolve().parent / "terminal.svg"
    write_text(path, draw_terminal(Path(sys.argv[1])))
    print(f"{path}: {path.stat().st_size:,} bytes")
