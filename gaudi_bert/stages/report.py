"""The stage `report`: report.html, one page with the figures and pictures of a work folder, as far as it has come."""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.artefacts.store.location import shown_place
from gaudi_bert.artefacts.store.workplace import workplace
from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.files import write_text
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import StoreSettings
from gaudi_bert.stages.results import ReportResult

__all__ = ["report"]


def report(workdir: Path, *, reporter: Reporter, store: StoreSettings | None = None) -> ReportResult:
    """Write `workdir`/report.html, a function of the files that `workdir` holds.

    Args:
        workdir: a work folder.
        reporter: where progress goes.
        store: how object stores are reached, where it is a URL.

    Raises:
        InputError: the folder is missing, holds nothing to report on, or a file in it is malformed.
        FailedError: the page cannot be written.
    """
    from gaudi_bert.reporting.inputs import NAMES, read_inputs
    from gaudi_bert.reporting.page import render_page, summary_cards

    with workplace(Path(workdir), store) as place:
        place.fetch(*(place.folder / name for name in NAMES.values()))
        inputs = read_inputs(place.folder)
        page = render_page(inputs)
        path = WorkFolder.found(place.folder).report
        write_text(path, page)
        place.put(path)
    shown = shown_place(WorkFolder.found(Path(workdir)).report)
    reporter.say(f"{shown}: written; open it in a browser")
    figures = {card.name: f"{card.figure} ({card.note})" for card in summary_cards(inputs)}
    return ReportResult(shown, len(page.encode("utf-8")), figures)
