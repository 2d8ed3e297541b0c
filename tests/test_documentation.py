"""The pages keep their promises: links lead somewhere, commands and options exist, and Python prints what they say."""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from gaudi_bert.cli.main import app
from gaudi_bert.cli.output import EXAMPLES
from gaudi_bert.config.options import fill_pipeline_file_template
from gaudi_bert.config.pipeline import build_pipeline_json_schema
from tests.builders.pages import PAGES, ROOT, blocks, load_module, name

PROSE = {page: re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S) for page in PAGES}
# What a link or a picture leads to: `[text](target)`, `[name]: target` at the end of a page, and `<img src="target"`.
TARGETS = (r"\]\(([^)\s]+)\)", r"^\[[^\]]+\]: (\S+)$", r'<img src="([^"]+)"')
LONGEST_LINE = 125


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command of a group and its groups, with its full name (`k8s status`)."""
    for each in group.commands:
        command = group.get_command(None, each)
        yield from commands(command, f"{prefix}{each} ") if hasattr(command, "commands") else [(prefix + each, command)]


COMMANDS = dict(commands(typer.main.get_command(app)))


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


def targets(text: str) -> list[str]:
    return [target for pattern in TARGETS for target in re.findall(pattern, text, flags=re.M)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_is_in_the_index_with_short_lines_and_links_that_lead_to_files(page: Path) -> None:
    for target in targets(PROSE[page]):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name(page)} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{name(page)} links to {target}"
    used = set(re.findall(r"\]\[([^\]]+)\]", PROSE[page]))
    assert used == set(re.findall(r"^\[([^\]]+)\]: ", PROSE[page], flags=re.M))
    text = page.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if len(line) > LONGEST_LINE and not re.match(r"\||\[[^\]]+\]: ", line)] == []
    index = ROOT / "docs" / "README.md"
    assert page.parent != index.parent or page == index or f"({page.name})" in index.read_text(encoding="utf-8")


def test_the_page_of_an_index_has_links_that_work_there_and_without_an_address_none(repository: Path) -> None:
    setup, readme = load_module(repository / "setup.py"), repository / "README.md"
    assert {re.match(r"[a-z]+:", target) is None for target in targets(PROSE[readme])} == {True, False}
    for address in ("", "https://host.invalid/owner/gaudi-bert"):
        page = setup.index_page(PROSE[readme], address)
        assert [target for target in targets(page) if not re.match(r"[a-z]+:|#", target)] == []
        assert bool(address) == bool(setup.addresses(address)) == ("host.invalid" in page) == ("][" in page)
    assert setup.index_page("see [a](b.md), [c][d]\n\n[d]: e.md#f\n", "x:") == (
        "see [a](x:/blob/main/b.md), [c][d]\n\n[d]: x:/blob/main/e.md#f\n"
    )


def test_no_file_names_an_address_of_the_project_that_nobody_serves(repository: Path) -> None:
    """It has none yet: where it is served is said in setup.py alone."""
    if load_module(repository / "setup.py").REPOSITORY:
        return
    listed = subprocess.run(["git", "ls-files"], cwd=repository, capture_output=True, text=True, check=False).stdout.split()
    files = [repository / file for file in listed] or [
        path for path in repository.rglob("*.md") if ".venv" not in path.parts
    ]
    found = [path for path in files if path.is_file() and re.search(rb"//[\w.-]+/gaudi-bert/", path.read_bytes())]
    assert found == []


@pytest.mark.parametrize(("page", "line"), QUOTED)
def test_quoted_commands_exist(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    parts = 2 if words[0] == "k8s" else 1
    assert COMMANDS[" ".join(words[:parts])].make_context(" ".join(words[:parts]), list(words[parts:])).params


def test_the_page_of_commands_is_made_from_them(repository: Path) -> None:
    written = (repository / "docs" / "commands.md").read_text(encoding="utf-8")
    expected = load_module(repository / "scripts" / "write_commands_page.py").page()
    assert written == expected, "run python scripts/write_commands_page.py"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained_and_every_command_has_an_example_that_parses(command: str) -> None:
    assert [parameter.name for parameter in COMMANDS[command].params if not parameter.help] == []
    if not COMMANDS[command].hidden and not command.startswith("k8s"):
        name, *words = shlex.split(EXAMPLES[command])[1:]
        assert name == command
        assert COMMANDS[command].make_context(command, words).params


def test_the_schema_of_pipeline_files_is_current_and_takes_all_that_we_ship(repository: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = build_pipeline_json_schema()
    written = json.loads((repository / "pipelines" / "pipeline.schema.json").read_text(encoding="utf-8"))
    assert written == schema, "write it again: gaudi-bert settings --json > pipelines/pipeline.schema.json"
    files = sorted((repository / "pipelines").glob("*.yaml"))
    texts = [
        *(path.read_text(encoding="utf-8") for path in files),
        fill_pipeline_file_template("wiki"),
        fill_pipeline_file_template("retrieval"),
    ]
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
    naming = {file for file in files if re.search(r"'\.\[|\./gaudi-bert\[", file.read_text(encoding="utf-8"))}
    assert naming == {ROOT / "README.md", ROOT / "docs" / "start.md", ROOT / "gaudi_bert" / "common" / "errors.py"}
    for file in files:
        assert re.search(r"pip\s+install\s+(--\S+\s+)*'?gaudi-bert", file.read_text(encoding="utf-8")) is None, file


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


def test_the_files_of_a_command_are_where_contributing_says(repository: Path) -> None:
    section = (repository / "CONTRIBUTING.md").read_text().partition("## A command, file by file")[2].partition("\n## ")[0]
    walks = re.findall(r"^- .*?, (\d+) files: (.*?)\.$", section, re.MULTILINE | re.DOTALL)
    assert len(walks) == 6
    for count, text in walks:
        names, folder = re.split(r"[,;]\s+", re.sub(r"\s+\([^)]*\)", "", text)), Path("cli")
        assert len(names) == int(count)
        for each in names:
            known = (Path(above, f"{each}.py") for above in ("", folder, folder.parent))
            file = next(file for file in known if (repository / "gaudi_bert" / file).is_file())
            folder = file.parent
