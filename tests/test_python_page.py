"""The Python of README.md and of docs/python.md, run as a reader would: what is printed is what the page says."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "python.md"
README = REPOSITORY / "README.md"
PRINTS = re.compile(r"^ *print\(.*\)  # (.*)$", re.M)


def test_every_snippet_prints_what_the_page_says() -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    assert len(snippets) >= 5
    names: dict[str, Any] = {}
    for snippet in snippets:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(snippet, str(PAGE), "exec"), names)
        assert printed.getvalue().splitlines() == PRINTS.findall(snippet)
        assert len(PRINTS.findall(snippet)) == snippet.count("print(")


def test_the_session_of_the_readme_prints_what_it_shows() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.S)
    sessions = [block for block in blocks if block.startswith(">>>")]
    assert sessions
    for session in sessions:
        test = doctest.DocTestParser().get_doctest(session, {}, "README.md", str(README), 0)
        differences = io.StringIO()
        result = doctest.DocTestRunner().run(test, out=differences.write)
        assert result.attempted >= 3
        assert result.failed == 0, differences.getvalue()
