"""The stage `report`: report.html, one page with the figures and pictures of a work folder, as far as it has come."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import numpy as np

from gaudi_bert.artefacts.results import PlainResult
from gaudi_bert.artefacts.store.mirrored_folder import fetch, mirrored, shown_path
from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.files import write_text
from gaudi_bert.common.progress import human_bytes
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import SEARCH_TASKS
from gaudi_bert.reporting.inputs import NAMES, ReportInputs, read_inputs
from gaudi_bert.reporting.packing_pictures import (
    adapts_to_dark_pages,
    draw_curves,
    draw_fills,
    draw_mixture,
    draw_slots,
    page_style,
    percent,
    picture_bytes,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def report(workdir: Path, *, store: StoreSettings | None = None) -> PlainResult:
    """Write report.html into a work folder, as a function of the other files there."""
    with mirrored(Path(workdir), store) as folder:
        fetch(*(folder / name for name in NAMES.values()))
        inputs = read_inputs(folder)
        page = render_page(inputs)
        path = WorkFolder.existing(folder).report
        write_text(path, page)
        name = shown_path(path)
    figures = {card.name: f"{card.figure} ({card.note})" for card in summary_cards(inputs)}
    size = len(page.encode("utf-8"))
    text = [f"{figure}: {value}" for figure, value in figures.items()]
    text.append(f"the page: {name} ({human_bytes(size)}); open it in a browser")
    return PlainResult(text, {"report": name, "bytes": size, **figures})


# --- the report as one self-contained HTML page: no script, no link to anything outside, pictures inline, no date.
#
# The template holds the words; this module turns the inputs into the figures, pictures and tables that it shows.


class _Card(NamedTuple):
    """One figure of the summary, and what stands below it."""

    name: str
    figure: str
    note: str


def render_page(inputs: ReportInputs) -> str:
    """The page as HTML text, a function of `inputs` alone."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("gaudi_bert.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    with page_style():
        pictures = {name: Markup(_image(figure, words)) for name, (figure, words) in _figures(inputs).items()}
    return environment.get_template("report.html").render(
        inputs=inputs,
        cards=summary_cards(inputs),
        pictures=pictures,
        missing=_missing(inputs),
        results=_results(inputs),
        task=_task(inputs),
        settings=_settings(inputs),
        files=[(NAMES[key], words) for key, words in _FILES.items() if getattr(inputs, key) is not None],
    )


_FILES = {
    "examples": "the examples: splits, files, vocabulary",
    "histogram_file": "sequences of each length, per file",
    "plan": "which lengths share a pack, and the proven bound",
    "metadata": "the packed training records: sizes, shards, checksums",
    "verification": "the proof that every sequence is there once",
    "metrics": "losses and accuracies during training, a line each",
    "training": "how the run ended, with the speed-up that packing brought",
    "evaluation": "losses and accuracies of the last checkpoint",
    "pipeline": "the settings of the pipeline as they were used",
    "finetuning": "what was learnt of the task, from how many packs",
    "finetuning_lines": "losses and metrics during fine-tuning, a line each",
    "finetuning_pipeline": "the settings as fine-tuning used them",
    "predictions": "an answer for each row, in the order of the rows",
}


def summary_cards(inputs: ReportInputs) -> list[_Card]:
    """The figures at the top of the page, as far as they are known."""
    cards: list[_Card] = []
    histogram, totals = inputs.histogram, inputs.totals
    if histogram is not None:
        slots = histogram.max_sequence_length
        before = histogram.tokens / (histogram.sequences * slots)
        if totals is None:
            cards.append(_Card("Sequences", f"{histogram.sequences:,}", f"of at most {slots} tokens"))
            cards.append(_Card("Efficiency", percent(before), "real tokens / slots, not packed yet"))
        else:
            packs, bound = totals.packs, totals.lower_bound
            factor = f"{totals.packing_factor:.3f}"
            cards.append(_Card("Packing factor", factor, f"{histogram.sequences:,} sequences in {packs:,} packs"))
            cards += _speedup_card(inputs, totals.packing_factor)
            after = percent(totals.efficiency, 2)
            cards.append(_Card("Efficiency", after, f"real tokens / slots; {percent(before)} unpacked"))
            gap, note = packs - bound, f"{bound:,} packs: proven optimal"
            if gap:
                note = f"{percent(gap / bound, 2)} above {bound:,}, which is proven" if bound else ""
            cards.append(_Card("Above the bound", f"{gap:,} {'pack' if gap == 1 else 'packs'}", note))
    if inputs.verification is not None:
        note = f"each of {inputs.verification.sequences:,} sequences is there exactly once"
        cards.append(_Card("Verified", "yes", note))
    return cards + _learning_cards(inputs) + _task_cards(inputs)


def _speedup_card(inputs: ReportInputs, packing_factor: float) -> list[_Card]:
    """The one that was measured on the device that trained, where `training.measure_speedup` is set."""
    speedup = inputs.training.realized_speedup if inputs.training is not None else None
    if speedup is None:
        return []
    note = f"sequences per second, packed compared with padded: {percent(speedup / packing_factor, 0)} of the factor"
    plan = inputs.plan
    if speedup < packing_factor and plan is not None and plan.masked_slots:
        note += f"; a pack has {plan.masked_slots} masked slots, a padded row {plan.max_predictions}"
    return [_Card("Realized speed-up", f"{speedup:.3f}", note)]


def _learning_cards(inputs: ReportInputs) -> list[_Card]:
    evaluation = inputs.evaluation
    if evaluation is None:
        return []
    accuracy, baseline = evaluation.masked_lm_accuracy, evaluation.unigram_baseline
    note = next_sentence_note = "on held-out documents"
    if baseline:
        note = f"{accuracy / baseline:.1f} times the unigram baseline, {percent(baseline)}"
    if evaluation.next_sentence_baseline is not None:
        next_sentence_note = f"the more frequent answer alone: {percent(evaluation.next_sentence_baseline)}"
    return [
        _Card("Masked-LM accuracy", percent(accuracy), note),
        _Card("Next-sentence accuracy", percent(evaluation.next_sentence_accuracy), next_sentence_note),
    ]


def _task_cards(inputs: ReportInputs) -> list[_Card]:
    """Return the scores of the task, next to that of always giving the same answer."""
    learnt = inputs.finetuning
    if learnt is None or learnt.best_metric is None:
        return []
    name = learnt.best_metric
    note = f"{learnt.task}, {learnt.evaluated_rows:,} held-out rows"
    if name in learnt.baseline:
        what = "before training" if learnt.task in SEARCH_TASKS else "always the same answer"
        note += f"; {what}: {_metric(name, learnt.baseline[name])}"
    return [_Card(_title(name), _metric(name, learnt.metrics[name]), note)]


def _task(inputs: ReportInputs) -> dict[str, Any] | None:
    """Describe fine-tuning: a sentence, rows (name, value, baseline) of its metrics, and rows (name, value) of its packs."""
    learnt = inputs.finetuning
    if learnt is None:
        return None
    metrics = [
        (_title(name), _metric(name, value), _metric(name, learnt.baseline[name]) if name in learnt.baseline else "")
        for name, value in learnt.metrics.items()
    ]
    rows = [
        ("task", f"{learnt.task}, {len(learnt.labels)} labels" if learnt.labels else learnt.task),
        ("weights it started from", learnt.model),
        ("sequences per epoch", f"{learnt.sequences:,}"),
        ("packs", f"{learnt.packs:,} of depth {learnt.depth} ({learnt.algorithm})"),
        ("packing factor", f"{learnt.packing_factor:.3f}"),
        ("above the proven bound", f"{learnt.packs - learnt.lower_bound:,}"),
        ("epochs, updates", f"{learnt.epochs}, {learnt.updates:,}"),
    ]
    last = next((line for line in reversed(inputs.finetuning_lines or ()) if line.kind == "train"), None)
    if last is not None and last.sequences_per_second is not None:
        tokens = f" ({last.tokens_per_second:,.0f} real tokens)" if last.tokens_per_second is not None else ""
        rows.append(("sequences per second", f"{last.sequences_per_second:,.0f}{tokens}"))
    return {"metrics": metrics, "work": rows, "best_update": f"{learnt.best_update:,}"}


def _title(metric: str) -> str:
    """`f1_macro` as `F1 macro`."""
    return metric.replace("_", " ").capitalize()


def _metric(name: str, value: float) -> str:
    """A share as percent; SQuAD's scores are percent already, and a loss is not a share."""
    return percent(value) if name == "accuracy" else f"{value:,.4f}"


_CURVES = {
    "masked_lm_loss": "Masked-LM loss",
    "masked_lm_accuracy": "Masked-LM accuracy",
    "next_sentence_loss": "Next-sentence loss",
    "next_sentence_accuracy": "Next-sentence accuracy",
}


# What browsers take as it is in a data URL inside single quotes; `#`, `%`, `&` and the quote are not among them.
_PLAIN_IN_URLS = ' !"$()*+,-./:;<=>?@_~'


def _image(figure: Figure, words: str) -> str:
    """A picture inside the page; `words` say what it shows, for those who cannot see it."""
    svg = b" ".join(adapts_to_dark_pages(picture_bytes(figure, "svg")).split())
    # Percent-encoded, because SVG is text: base64 would make the page a third larger.
    return f"<img alt='{escape(words)}' src='data:image/svg+xml,{quote(svg, safe=_PLAIN_IN_URLS)}'>"


def _figures(inputs: ReportInputs) -> dict[str, tuple[Figure, str]]:
    figures: dict[str, tuple[Figure, str]] = {}
    histogram, mixture, totals = inputs.histogram, inputs.mixture, inputs.totals
    if histogram is not None:
        slots = histogram.max_sequence_length
        before, after = histogram.counts, None
        if mixture is not None:  # packs that hold 1, 2, ..., L tokens
            after = np.zeros(slots, dtype=np.int64)
            for strategy, count in mixture.items():
                after[sum(strategy) - 1] += count
        full = [percent(int(fills[-1]) / max(int(fills.sum()), 1)) for fills in (before, after) if fills is not None]
        words = f"Bars: share of rows by their real tokens. Before packing, {full[0]} of the rows are full"
        words += f"; after packing, {full[1]}." if len(full) > 1 else "."
        figures["fill"] = draw_fills(before, after), words
        if totals is not None:
            figure = draw_slots(histogram.sequences, totals.packs, histogram.tokens, slots, totals.lower_bound)
            words = f"Two bars to scale: {histogram.sequences:,} rows before packing, {totals.packs:,} after it."
            figures["slots"] = figure, f"{words} A line marks the proven bound, {totals.lower_bound:,} rows."
        if mixture:
            strategy = max(mixture, key=lambda lengths: (mixture[lengths], lengths))
            words = "Rows to scale, one for each of the strategies used most. The most frequent one: "
            words += f"{' + '.join(map(str, sorted(strategy, reverse=True)))} tokens."
            figures["strategies"] = draw_mixture(mixture, slots, most=12), words
    if inputs.metrics:
        for name in _CURVES:
            figures[name] = _curves(inputs, name)
    return figures


# What is reached without learning, by the curve that has it as a line.
_BASELINES = {
    "masked_lm_accuracy": ("unigram_baseline", "unigram baseline"),
    "next_sentence_accuracy": ("next_sentence_baseline", "more frequent answer"),
}


def _curves(inputs: ReportInputs, name: str) -> tuple[Figure, str]:
    """The curves of one figure, and where they begin and end in words."""
    is_accuracy = name.endswith("accuracy")
    key, words = _BASELINES.get(name, ("", ""))
    value = getattr(inputs.evaluation, key, None)
    training, held_out = (
        [(line.sequences, getattr(line, name)) for line in inputs.metrics or () if line.kind == kind]
        for kind in ("train", "evaluation")
    )
    figure = draw_curves(training, held_out, is_accuracy=is_accuracy, baseline=value and (words, value))
    shown = percent if is_accuracy else "{:.3f}".format
    spans = [
        f"{kind} from {shown(points[0][1])} to {shown(points[-1][1])}"
        for kind, points in (("training", training), ("held out", held_out))
        if points
    ]
    return figure, f"{_CURVES[name]} over the sequences seen: {', '.join(spans)}."


def _missing(inputs: ReportInputs) -> list[str]:
    """List what the page cannot show yet, and the stage that computes it."""
    stages = {"plan": "plan", "metadata": "write", "verification": "verify", "metrics": "train", "evaluation": "evaluate"}
    tasks_alone = inputs.histogram is None and (inputs.finetuning is not None or inputs.predictions is not None)
    if tasks_alone:
        return []
    missing = [f"{NAMES[key]} (stage {stage})" for key, stage in stages.items() if not getattr(inputs, key)]
    return missing if inputs.histogram is not None else [f"{NAMES['histogram_file']} (stage histogram)", *missing]


def _results(inputs: ReportInputs) -> list[tuple[str, str, str]]:
    """Rows (name, training, held out) of the losses and accuracies at the end."""
    last = next((line for line in reversed(inputs.metrics or ()) if line.kind == "train"), None)
    names = {
        "masked_lm_loss": "masked-LM loss",
        "masked_lm_accuracy": "masked-LM accuracy",
        "unigram_baseline": "unigram baseline",
        "next_sentence_loss": "next-sentence loss",
        "next_sentence_accuracy": "next-sentence accuracy",
        "next_sentence_baseline": "next-sentence baseline",
        "sequences_per_second": "sequences per second",
        "tokens_per_second": "real tokens per second",
    }
    rows = [
        (shown, _cell(getattr(last, name, None)), _cell(getattr(inputs.evaluation, name, None)))
        for name, shown in names.items()
    ]
    return [row for row in rows if row[1] or row[2]]


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.4f}"


_Tables = list[tuple[str, list[tuple[str, str]]]]


def _settings(inputs: ReportInputs) -> tuple[_Tables, _Tables]:
    """Tables (title, rows) of the settings that are not the defaults, and of all others.

    They are those of the pipeline where training stored them, else of what there is.
    """
    pipeline = inputs.finetuning_pipeline or inputs.pipeline
    if pipeline is not None:
        sections = {name: value for name, value in pipeline.items() if isinstance(value, dict)}
    else:
        stored = {"prepare": inputs.prepare_settings, "packing": inputs.plan_settings}
        sections = {name: dict(value.settings) for name, value in stored.items() if value is not None}
    usual = PipelineSettings().model_dump(mode="json")
    changed: _Tables = []
    others: _Tables = []
    for name, rows in sections.items():
        defaults = usual.get(name, {})
        for tables, is_usual in ((changed, False), (others, True)):
            own = [(key, _written(value)) for key, value in rows.items() if (defaults.get(key, value) == value) == is_usual]
            tables += [(name, own)] if own else []
    return changed, others


def _written(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_written(part)}" for key, part in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 100_000 else str(value)
