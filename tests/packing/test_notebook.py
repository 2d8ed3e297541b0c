"""The notebook of examples/: its cells, run in sequence, show what is saved in it."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOK = "packing.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last line if that is an expression."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), NOTEBOOK, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), NOTEBOOK, "eval"), names)
    return printed.getvalue(), value


def saved(cell: dict[str, Any]) -> dict[str, str]:
    """What the notebook shows below a cell, by its kind."""
    shown: dict[str, str] = {}
    for output in cell["outputs"]:
        data = {"printed": output["text"]} if output["output_type"] == "stream" else output["data"]
        shown |= {kind: "".join(lines) for kind, lines in data.items()}
    return shown


def test_each_cell_shows_what_is_saved(repository: Path) -> None:
    notebook = json.loads((repository / "examples" / NOTEBOOK).read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    names: dict[str, Any] = {}
    for cell in cells:
        printed, value = run_cell("".join(cell["source"]), names)
        shows = {"printed": printed} if printed else {}
        if value is not None:
            shows |= {"text/plain": repr(value), "text/html": value._repr_html_()}
        assert shows == saved(cell), "run the notebook in Jupyter and save it"
        assert shows
