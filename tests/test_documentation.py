"""The pages keep their promises: links lead somewhere, commands and options exist, and Python prints what they say."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from gaudi_bert.cli.help import EXAMPLES
from gaudi_bert.cli.main import app
from gaudi_bert.config.pipeline import settings_schema
from gaudi_bert.config.shipped import new_pipeline
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


def test_the_page_of_commands_is_made_from_them(repository: Path) -> None:
    specification = importlib.util.spec_from_file_location("page", repository / "scripts" / "write_commands_page.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    written = (repository / "docs" / "commands.md").read_text(encoding="utf-8")
    assert written == module.page(), "run python scripts/write_commands_page.py"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained_and_every_command_has_an_example_that_parses(command: str) -> None:
    parameters = COMMANDS[command].params
    assert [parameter.name for parameter in parameters if not parameter.help] == []
    if not COMMANDS[command].hidden and not command.startswith("k8s"):
        name, *words = shlex.split(EXAMPLES[command])[1:]
        assert name == command
        assert COMMANDS[command].make_context(command, words).params


def test_the_schema_of_pipeline_files_is_current_and_takes_all_that_we_ship(repository: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = settings_schema()
    written = json.loads((repository / "docs" / "pipeline.schema.json").read_text(encoding="utf-8"))
    assert written == schema, "write it again: gaudi-bert settings --json > docs/pipeline.schema.json"
    files = sorted((repository / "pipelines").glob("*.yaml"))
    texts = [*(path.read_text(encoding="utf-8") for path in files), new_pipeline("wiki")]
    assert len(texts) > 7
    for text in texts:
        jsonschema.Draft202012Validator(schema).validate(yaml.safe_load(text))
        assert max(map(len, text.splitlines())) <= 120
        assert not re.search(r"^ *[\w]+: *[{\[]", text, flags=re.M), "block style is easier to change"
    for path in files:
        assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 100, path
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate({"packing": {"depht": 3}})


def test_two_pages_and_one_module_have_the_form_of_installing() -> None:
    """gaudi-bert is on no package index: `pip install gaudi-bert` would find nothing, or what others put there."""
    files = [*PAGES, *(ROOT / "gaudi_bert").rglob("*.py")]
    naming = {file for file in files if "gaudi-bert[" in file.read_text(encoding="utf-8")}
    assert naming == {ROOT / "README.md", ROOT / "docs" / "start.md", ROOT / "gaudi_bert" / "common" / "errors.py"}
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
