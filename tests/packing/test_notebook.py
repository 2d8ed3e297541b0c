"""The notebook of examples/: its cells, run in sequence, show what is saved in it."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

NOTEBOOK = "packing.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last expression, which a notebook displays."""
    printed, values = io.StringIO(), [None]
    with contextlib.redirect_stdout(printed), patch.object(sys, "displayhook", values.append):
        exec(compile(ast.Interactive(ast.parse(source).body), NOTEBOOK, "single"), names)
    return printed.getvalue(), values[-1]


def saved(cell: dict[str, Any]) -> dict[str, str]:
    """What the notebook shows below a cell, by its kind."""
    outputs = [{"printed": each["text"]} if each["output_type"] == "stream" else each["data"] for each in cell["outputs"]]
    return {kind: "".join(lines) for data in outputs for kind, lines in data.items()}


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
