#!/usr/bin/env python3
"""Write the tables of docs/commands.md, which contain an example and the summary of each command.

scripts/write_commands_page.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from typer.main import get_command

from gaudi_bert.cli.main import GROUPS, app
from gaudi_bert.cli.output import EXAMPLES
from gaudi_bert.common.files import write_text

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
START = "## Before anything is written\n"


def tables() -> Iterator[str]:
    """Yield the lines of the page from `START` on."""
    commands = get_command(app).commands
    for title, group in GROUPS.items():
        yield from [f"## {title}", "", "| for example | what the command does |", "|---|---|"]
        listed = {name: EXAMPLES[name] for name in group if not commands[name].hidden}
        if "run" in group:
            listed["k8s"] = "gaudi-bert k8s status wiki.yaml"
        for name, example in listed.items():
            yield f"| `{example}` | {commands[name].get_short_help_str(limit=1000)} |"
        if "run" in group:
            for name, command in commands["k8s"].commands.items():
                yield f"| `gaudi-bert k8s {name} ...` | {command.get_short_help_str(limit=1000)} |"
        yield ""


def page() -> str:
    """Return the complete page: the existing rules, followed by the tables."""
    text = PAGE.read_text(encoding="utf-8")
    return text[: text.index(START)] + "\n".join(tables())


if __name__ == "__main__":
    write_text(PAGE, page())
