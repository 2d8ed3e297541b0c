"""The stage `report`: report.html, one page with the figures and pictures of a work folder, as far as it has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np

from gaudi_bert.artefacts.completion import Signature, read_signature, settings_path
from gaudi_bert.artefacts.examples import PreparedExamples
from gaudi_bert.artefacts.histogram import HistogramFile
from gaudi_bert.artefacts.mirrored_folder import fetch, mirrored, shown_path
from gaudi_bert.artefacts.packed import Metadata, Verification
from gaudi_bert.artefacts.plan import Plan, PlanTotals
from gaudi_bert.artefacts.results import PlainResult
from gaudi_bert.artefacts.training import EvaluationResult, FineTuning, FineTuningLine, MetricsLine, TrainingResult
from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explain_os_errors, open_file, read_text, write_text
from gaudi_bert.common.progress import format_bytes
from gaudi_bert.config.pipeline import PipelineSettings, parse_yaml
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import SEARCH_TASKS
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.reporting.packing_pictures import (
    adapts_to_dark_pages,
    draw_curves,
    draw_fills,
    draw_slots,
    draw_strategy_counts,
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
        inputs = _read_inputs(folder)
        page = _render_page(inputs)
        path = WorkFolder.existing(folder).report
        write_text(path, page)
        name = shown_path(path)
    figures = {card.name: f"{card.figure} ({card.note})" for card in _summary_cards(inputs)}
    size = len(page.encode("utf-8"))
    text = [f"{figure}: {value}" for figure, value in figures.items()]
    text.append(f"the page: {name} ({format_bytes(size)}); open it in a browser")
    return PlainResult(text, {"report": name, "bytes": size, **figures})


# --- what the report reads: the files of one work folder, each of which may be missing, and is then named on the page

StrategyCounts = dict[tuple[int, ...], int]


def _sources(workdir: Path) -> dict[str, tuple[Path, Callable[[Path], Any]]]:
    """Return the path of each of `_ReportInputs`, and what reads it."""
    folder = WorkFolder.existing(workdir)
    train = folder.split("train")
    return {
        "examples": (folder.examples_summary, lambda path: PreparedExamples.read(path.parent)),
        "prepare_settings": (settings_path(folder.examples), read_signature),
        "histogram_file": (train.histogram, HistogramFile.read),
        "plan": (train.plan, Plan.read),
        "plan_settings": (settings_path(train.plan), read_signature),
        "metadata": (train.metadata, lambda path: Metadata.read(path.parent)),
        "verification": (train.verification, Verification.read),
        "metrics": (folder.train / "metrics.jsonl", MetricsLine.read_lines),
        "training": (folder.training_result, TrainingResult.read),
        "evaluation": (folder.evaluation_result, EvaluationResult.read),
        "pipeline": (folder.train / "settings.yaml", _read_pipeline),
        "finetuning": (folder.finetuning_result, FineTuning.read),
        "finetuning_lines": (folder.finetune / "metrics.jsonl", FineTuningLine.read_lines),
        "finetuning_pipeline": (folder.finetune / "settings.yaml", _read_pipeline),
        "predictions": (folder.predictions, _count_lines),
    }


def _count_lines(path: Path) -> int:
    with explain_os_errors(path, "read"), open_file(path) as handle:
        return sum(block.count(b"\n") for block in iter(lambda: handle.read(2**20), b""))


def _read_pipeline(path: Path) -> dict[str, Any] | None:
    pipeline = parse_yaml(read_text(path), str(path))
    return pipeline if isinstance(pipeline, dict) else None


NAMES = {key: path.as_posix() for key, (path, _) in _sources(Path()).items()}
"""How the inputs are called on the page: relative to the work folder."""

_ENOUGH = ("examples", "histogram_file", "plan", "metadata", "metrics", "evaluation", "finetuning", "predictions")


@dataclass(frozen=True)
class _ReportInputs:
    """The contents of a work folder by the keys of `NAMES`; None where a file is missing.

    `predictions` is how many rows were answered.
    """

    name: str
    examples: PreparedExamples | None
    prepare_settings: Signature | None
    histogram_file: HistogramFile | None
    plan: Plan | None
    plan_settings: Signature | None
    metadata: Metadata | None
    verification: Verification | None
    metrics: tuple[MetricsLine, ...] | None
    training: TrainingResult | None
    evaluation: EvaluationResult | None
    pipeline: dict[str, Any] | None
    finetuning: FineTuning | None
    finetuning_lines: tuple[FineTuningLine, ...] | None
    finetuning_pipeline: dict[str, Any] | None
    predictions: int | None

    @property
    def histogram(self) -> Histogram | None:
        """Sequences per length, from the metadata or from histogram.json."""
        if self.metadata is not None:
            return Histogram(self.metadata.max_sequence_length, np.array(self.metadata.histogram))
        if self.histogram_file is not None:
            return Histogram(self.histogram_file.max_sequence_length, np.array(self.histogram_file.counts))
        return None

    @property
    def totals(self) -> Metadata | PlanTotals | None:
        """The quality of the packing: of what was written, or else of the plan."""
        if self.metadata is not None:
            return self.metadata
        return self.plan.totals if self.plan is not None else None

    @property
    def strategy_counts(self) -> StrategyCounts | None:
        """Number of packs of each strategy, over all groups of the plan."""
        return self.plan.strategy_counts if self.plan is not None else None


def _read_inputs(workdir: Path) -> _ReportInputs:
    """Read what `workdir` holds."""
    if not workdir.is_dir():
        raise InputError(f"{workdir}: no such folder; give a work folder, for example work/demo")
    sources = {key: (path, reader) for key, (path, reader) in _sources(workdir).items() if path.exists()}
    if not sources.keys() & set(_ENOUGH):
        names = ", ".join(NAMES[key] for key in _ENOUGH)
        raise InputError(f"{workdir}: nothing to report on (looked for {names}); run the pipeline first")
    read = dict.fromkeys(NAMES) | {key: reader(path) for key, (path, reader) in sources.items()}
    inputs = _ReportInputs(name=workdir.resolve().name, **read)
    if inputs.metadata is not None and inputs.verification is not None:
        Verification.read_of(sources["verification"][0], inputs.metadata)  # refuses that of other packs
    histogram, plan = inputs.histogram, workdir / NAMES["plan"]
    if histogram is not None and histogram.sequences == 0:
        raise InputError(f"{plan.parent}: its histogram holds no sequence; make it again from records that hold some")
    largest = max((sum(strategy) for strategy in inputs.strategy_counts or {}), default=0)
    if histogram is not None and largest > histogram.max_sequence_length:
        slots = histogram.max_sequence_length
        raise InputError(f"{plan}: a pack of {largest} tokens, rows of {slots} in the histogram; plan again from it")
    return inputs


# --- the report as one self-contained HTML page: no script, no link to anything outside, pictures inline, no date; its
# words are in the template


class _Card(NamedTuple):
    """One figure of the summary, and what stands below it."""

    name: str
    figure: str
    note: str


def _render_page(inputs: _ReportInputs) -> str:
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
    environment.filters |= {"metric": _metric, "cell": _cell}
    pictures = {}
    with page_style():
        for name, (figure, words) in _figures(inputs).items():
            svg = b" ".join(adapts_to_dark_pages(picture_bytes(figure, "svg")).split())
            # Percent-encoded, because SVG is text: base64 would make the page a third larger.
            source = quote(svg, safe=_PLAIN_IN_URLS)
            pictures[name] = Markup(f"<img alt='{escape(words)}' src='data:image/svg+xml,{source}'>")
    return environment.get_template("report.html").render(
        inputs=inputs,
        names=NAMES,
        cards=_summary_cards(inputs),
        pictures=pictures,
        missing=_missing(inputs),
        last=_last_training_line(inputs.metrics),
        last_of_task=_last_training_line(inputs.finetuning_lines),
        settings=_settings(inputs),
    )


# What browsers take as it is in a data URL inside single quotes; `#`, `%`, `&` and the quote are not among them.
_PLAIN_IN_URLS = ' !"$()*+,-./:;<=>?@_~'

_Line = TypeVar("_Line", bound=FineTuningLine)


def _last_training_line(lines: Sequence[_Line] | None) -> _Line | None:
    return next((line for line in reversed(lines or ()) if line.kind == "train"), None)


def _summary_cards(inputs: _ReportInputs) -> list[_Card]:
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


def _speedup_card(inputs: _ReportInputs, packing_factor: float) -> list[_Card]:
    """The one that was measured on the device that trained, where `training.measure_speedup` is set."""
    speedup = inputs.training.realized_speedup if inputs.training is not None else None
    if speedup is None:
        return []
    note = f"sequences per second, packed compared with padded: {percent(speedup / packing_factor, 0)} of the factor"
    plan = inputs.plan
    if speedup < packing_factor and plan is not None and plan.masked_slots:
        note += f"; a pack has {plan.masked_slots} masked slots, a padded row {plan.max_predictions}"
    return [_Card("Realized speed-up", f"{speedup:.3f}", note)]


def _learning_cards(inputs: _ReportInputs) -> list[_Card]:
    evaluation = inputs.evaluation
    if evaluation is None:
        return []
    accuracy, baseline = evaluation.masked_lm_accuracy, evaluation.unigram_baseline
    note = "on held-out documents"
    if baseline:
        note = f"{accuracy / baseline:.1f} times the unigram baseline, {percent(baseline)}"
    next_sentence_note = f"the more frequent answer alone: {percent(evaluation.next_sentence_baseline)}"
    return [
        _Card("Masked-LM accuracy", percent(accuracy), note),
        _Card("Next-sentence accuracy", percent(evaluation.next_sentence_accuracy), next_sentence_note),
    ]


def _task_cards(inputs: _ReportInputs) -> list[_Card]:
    """Return the scores of the task, next to that of always giving the same answer."""
    learnt = inputs.finetuning
    if learnt is None or learnt.best_metric is None:
        return []
    name = learnt.best_metric
    note = f"{learnt.task}, {learnt.evaluated_rows:,} held-out rows"
    if name in learnt.baseline:
        what = "before training" if learnt.task in SEARCH_TASKS else "always the same answer"
        note += f"; {what}: {_metric(learnt.baseline[name], name)}"
    return [_Card(name.replace("_", " ").capitalize(), _metric(learnt.metrics[name], name), note)]


def _metric(value: float, name: str) -> str:
    """A share as percent; SQuAD's scores are percent already, and a loss is not a share."""
    return percent(value) if name == "accuracy" else f"{value:,.4f}"


_CURVES = {
    "masked_lm_loss": "Masked-LM loss",
    "masked_lm_accuracy": "Masked-LM accuracy",
    "next_sentence_loss": "Next-sentence loss",
    "next_sentence_accuracy": "Next-sentence accuracy",
}


def _figures(inputs: _ReportInputs) -> dict[str, tuple[Figure, str]]:
    figures: dict[str, tuple[Figure, str]] = {}
    histogram, strategy_counts, totals = inputs.histogram, inputs.strategy_counts, inputs.totals
    if histogram is not None:
        slots = histogram.max_sequence_length
        before, after = histogram.counts, None
        if strategy_counts is not None:  # packs that hold 1, 2, ..., L tokens
            after = np.zeros(slots, dtype=np.int64)
            for strategy, count in strategy_counts.items():
                after[sum(strategy) - 1] += count
        full = [percent(int(fills[-1]) / max(int(fills.sum()), 1)) for fills in (before, after) if fills is not None]
        words = f"Bars: share of rows by their real tokens. Before packing, {full[0]} of the rows are full"
        words += f"; after packing, {full[1]}." if len(full) > 1 else "."
        figures["fill"] = draw_fills(before, after), words
        if totals is not None:
            figure = draw_slots(histogram.sequences, totals.packs, histogram.tokens, slots, totals.lower_bound)
            words = f"Two bars to scale: {histogram.sequences:,} rows before packing, {totals.packs:,} after it."
            figures["slots"] = figure, f"{words} A line marks the proven bound, {totals.lower_bound:,} rows."
        if strategy_counts:
            strategy = max(strategy_counts, key=lambda lengths: (strategy_counts[lengths], lengths))
            words = "Rows to scale, one for each of the strategies used most. The most frequent one: "
            words += f"{' + '.join(map(str, sorted(strategy, reverse=True)))} tokens."
            figures["strategies"] = draw_strategy_counts(strategy_counts, slots, most=12), words
    if inputs.metrics:
        for name in _CURVES:
            figures[name] = _curves(inputs, name)
    return figures


# What is reached without learning, by the curve that has it as a line.
_BASELINES = {
    "masked_lm_accuracy": ("unigram_baseline", "unigram baseline"),
    "next_sentence_accuracy": ("next_sentence_baseline", "more frequent answer"),
}


def _curves(inputs: _ReportInputs, name: str) -> tuple[Figure, str]:
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


def _missing(inputs: _ReportInputs) -> list[str]:
    """List what the page cannot show yet, and the stage that computes it."""
    stages = {"plan": "plan", "metadata": "write", "verification": "verify", "metrics": "train", "evaluation": "evaluate"}
    tasks_alone = inputs.histogram is None and (inputs.finetuning is not None or inputs.predictions is not None)
    if tasks_alone:
        return []
    missing = [f"{NAMES[key]} (stage {stage})" for key, stage in stages.items() if not getattr(inputs, key)]
    return missing if inputs.histogram is not None else [f"{NAMES['histogram_file']} (stage histogram)", *missing]


def _cell(value: float | None) -> str:
    """A figure of the end of training; empty where it was not measured."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.4f}"


_Tables = list[tuple[str, list[tuple[str, str]]]]


def _settings(inputs: _ReportInputs) -> tuple[_Tables, _Tables]:
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
