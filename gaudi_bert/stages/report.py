"""The stage `report`: report.html, one page with the figures and pictures of a work folder, as far as it has come."""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.files import write_text
from gaudi_bert.common.progress import Reporter
from gaudi_bert.stages.results import ReportResult

__all__ = ["report"]


def report(workdir: Path, *, reporter: Reporter) -> ReportResult:
    """Write `workdir`/report.html, a function of the files that `workdir` holds.

    Raises:
        InputError: the folder is missing, holds nothing to report on, or a file in it is malformed.
        FailedError: the page cannot be written.
    """
    from gaudi_bert.reporting.inputs import read_inputs
    from gaudi_bert.reporting.page import render_page, summary_cards

    workdir = Path(workdir)
    inputs = read_inputs(workdir)
    page = render_page(inputs)
    path = WorkFolder.found(workdir).report
    write_text(path, page)
    reporter.say(f"{path}: written; open it in a browser")
    figures = {card.name: f"{card.figure} ({card.note})" for card in summary_cards(inputs)}
    return ReportResult(str(path), len(page.encode("utf-8")), figures)
