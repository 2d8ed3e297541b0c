"""The pages keep their promises: links lead somewhere, commands and options exist, and Python prints what they say."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from gaudi_bert.cli.main import app
from tests.builders.pages import PAGES, ROOT, blocks, name

PROSE = {page: re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S) for page in PAGES}
ONLINE = "https://github.com/gaudi-bert/gaudi-bert/blob/main/"
LONGEST_LINE = 125


def commands() -> dict[str, Any]:
    """Every command by its full name (`k8s status`), without `gaudi-bert`."""
    found: dict[str, Any] = {}

    def walk(command: Any, prefix: tuple[str, ...]) -> None:
        if hasattr(command, "commands"):
            for inner, child in command.commands.items():
                walk(child, (*prefix, inner))
        else:
            found[" ".join(prefix)] = command

    walk(typer.main.get_command(app), ())
    return found


COMMANDS = commands()


def quoted_commands() -> Iterator[tuple[str, str]]:
    """(page, command line) of each `gaudi-bert ...` line in a block of code."""
    for page in PAGES:
        for block in blocks(page):
            for line in block.commands:
                match = re.search(r"(?:^|[/|(] *)gaudi-bert (.*)", line)
                if match is not None:
                    yield name(page), match[1]


QUOTED = tuple(quoted_commands())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", PROSE[page]):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        assert name(page) != "README.md", f"{target} leads nowhere on a package index's page; link as the last lines do"
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name(page)} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{name(page)} links to {target}"


def test_links_and_pictures_of_the_readme_lead_to_files_of_the_repository(repository: Path) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    defined = dict(re.findall(rf"^\[([^\]]+)\]: {re.escape(ONLINE)}(\S+)$", text, flags=re.M))
    used = set(re.findall(r"\]\[([^\]]+)\]", text))
    assert used == set(defined)
    pictures = re.findall(r'<img src="https://raw.githubusercontent.com/gaudi-bert/gaudi-bert/main/([^"]+)"', text)
    assert len(pictures) == text.count("<img")
    for target in [*defined.values(), *pictures]:
        path, _, anchor = target.partition("#")
        assert (repository / path).exists(), target
        assert not anchor or anchor in anchors(repository / path), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_line_is_too_long(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [
        number for number, line in enumerate(lines, 1) if len(line) > LONGEST_LINE and not re.match(r"\||\[[^\]]+\]: ", line)
    ]
    assert long == []


@pytest.mark.parametrize(("page", "line"), QUOTED)
def test_quoted_commands_exist(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    parts = 2 if words[0] == "k8s" else 1
    command = COMMANDS[" ".join(words[:parts])]
    assert command.make_context(" ".join(words[:parts]), list(words[parts:])).params


def test_commands_are_quoted_in_places() -> None:
    assert len(QUOTED) > 30


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_is_on_a_page(command: str) -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    parameters = [parameter for parameter in COMMANDS[command].params if parameter.param_type_name == "option"]
    options = {option for parameter in parameters for option in parameter.opts if option.startswith("--")}
    first, *others = command.split()
    reference = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8").splitlines()
    lines = [line for line in reference if re.search(rf"`gaudi-bert {first}\b", line)]
    assert any(all(word in line for word in others) for line in lines)
    assert {option for option in options if not re.search(rf"{option}\b", pages)} == set()


def test_one_page_and_one_module_have_the_form_of_installing() -> None:
    """gaudi-bert is on no package index: `pip install gaudi-bert` would find nothing, or what others put there."""
    files = [*PAGES, *(ROOT / "gaudi_bert").rglob("*.py")]
    naming = {file for file in files if "gaudi-bert[" in file.read_text(encoding="utf-8")}
    assert naming == {ROOT / "docs" / "start.md", ROOT / "gaudi_bert" / "common" / "errors.py"}
    for file in files:
        assert re.search(r"pip\s+install\s+(--\S+\s+)*'?gaudi-bert", file.read_text(encoding="utf-8")) is None, file


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


# --- the Python of README.md and of docs/python.md, run as a reader would


PYTHON_PAGE = ROOT / "docs" / "python.md"
PRINTS = re.compile(r"^ *print\(.*\)  # (.*)$", re.M)


def test_every_snippet_prints_what_the_page_says() -> None:
    snippets = re.findall(r"```python\n(.*?)```", PYTHON_PAGE.read_text(encoding="utf-8"), flags=re.S)
    assert len(snippets) >= 5
    names: dict[str, Any] = {}
    for snippet in snippets:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(snippet, str(PYTHON_PAGE), "exec"), names)
        assert printed.getvalue().splitlines() == PRINTS.findall(snippet)
        assert len(PRINTS.findall(snippet)) == snippet.count("print(")


def test_the_session_of_the_readme_prints_what_it_shows() -> None:
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    sessions = [snippet for snippet in snippets if snippet.startswith(">>>")]
    assert sessions
    for session in sessions:
        test = doctest.DocTestParser().get_doctest(session, {}, "README.md", "README.md", 0)
        differences = io.StringIO()
        result = doctest.DocTestRunner().run(test, out=differences.write)
        assert result.attempted >= 3
        assert result.failed == 0, differences.getvalue()
