"""The stage `report`: report.html, one page with the figures and pictures of a work folder, as far as it has come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gaudi_bert.common.files import write_text
from gaudi_bert.common.progress import Reporter

__all__ = ["report"]


def report(workdir: Path, *, reporter: Reporter) -> dict[str, Any]:
    """Write `workdir`/report.html, a function of the files that `workdir` holds.

    Returns:
        `report` (where the page is), `bytes`, and the figures of its summary by name.

    Raises:
        InputError: the folder is missing, holds nothing to report on, or a file in it is malformed.
        FailedError: the page cannot be written.
    """
    from gaudi_bert.reporting.inputs import read_inputs
    from gaudi_bert.reporting.page import render_page, summary_cards

    workdir = Path(workdir)
    inputs = read_inputs(workdir)
    page = render_page(inputs)
    path = workdir / "report.html"
    write_text(path, page)
    reporter.say(f"{path}: written; open it in a browser")
    figures = {card.name: f"{card.figure} ({card.note})" for card in summary_cards(inputs)}
    return {"report": str(path), "bytes": len(page.encode("utf-8")), **figures}
