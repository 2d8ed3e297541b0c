"""The snippets of docs/python.md, run one after the other as a reader would: each line that prints says what it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "python.md"
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
