"""The stage `report`: report.html, one page with the figures and pictures of a work folder, as far as it has come."""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.artefacts.results import ReportResult
from gaudi_bert.artefacts.store.mirrored_folder import fetch, mirrored, shown
from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.files import write_text
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.reporting.inputs import NAMES, read_inputs
from gaudi_bert.reporting.page import render_page, summary_cards


def report(workdir: Path, *, store: StoreSettings | None = None) -> ReportResult:
    """Write report.html into a work folder, as a function of the other files there."""
    with mirrored(Path(workdir), store) as folder:
        fetch(*(folder / name for name in NAMES.values()))
        inputs = read_inputs(folder)
        page = render_page(inputs)
        path = WorkFolder.existing(folder).report
        write_text(path, page)
        name = shown(path)
    figures = {card.name: f"{card.figure} ({card.note})" for card in summary_cards(inputs)}
    return ReportResult(name, len(page.encode("utf-8")), figures)
