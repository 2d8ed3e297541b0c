"""Writes report.html, a page with the metrics and charts of a work folder, for `gaudi-bert report`.

The page shows the results of all stages that have run so far, and names the files that are missing. It is a single HTML file
without scripts, and without links to other files or servers. It depends only on the files in the work folder, so writing it
again gives the same bytes. The text of the page is in `templates/report.html`.
"""

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
from gaudi_bert.artefacts.mirrored_folder import download_missing_files, format_path, mirror_folder
from gaudi_bert.artefacts.packed import RecordMetadata, Verification
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
    add_dark_mode_style,
    draw_learning_curve,
    draw_row_fill,
    draw_slot_usage,
    draw_strategy_counts,
    encode_picture,
    format_percent,
    use_page_style,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def report(workdir: Path, *, store: StoreSettings | None = None) -> PlainResult:
    """Write the page report.html to a work folder.

    Args:
        workdir: The work folder, or its URL in an object store.
        store: The settings of the object store.

    Returns:
        The result to print, with the path of the page, its size in bytes, and the metrics of the summary.

    Raises:
        InputError: The folder does not exist, contains nothing to report on, or contains files that do not match.
    """
    with mirror_folder(Path(workdir), store) as folder:
        download_missing_files(*(folder / name for name in INPUT_NAMES.values()))
        inputs = _read_inputs(folder)
        page = _render_page(inputs)
        path = WorkFolder.from_existing(folder).report_path
        write_text(path, page)
        name = format_path(path)
    metrics = {card.name: f"{card.value} ({card.note})" for card in _make_summary_cards(inputs)}
    size = len(page.encode("utf-8"))
    lines = [f"{metric}: {value}" for metric, value in metrics.items()]
    lines.append(f"report: {name} ({format_bytes(size)}); open it in a browser")
    return PlainResult(lines, {"report": name, "bytes": size, **metrics})


# --- the files of a work folder that the report reads. Each of them may be missing.


def _list_input_files(workdir: Path) -> dict[str, tuple[Path, Callable[[Path], Any]]]:
    """Return the path of each file that the report needs, and the function that reads it. The keys are the fields of
    `_ReportInputs`.
    """
    folder = WorkFolder.from_existing(workdir)
    train = folder.data_split_paths("train")
    return {
        "examples": (folder.examples_summary_path, lambda path: PreparedExamples.read(path.parent)),
        "prepare_settings": (settings_path(folder.examples_folder), read_signature),
        "histogram_file": (train.histogram, HistogramFile.read),
        "plan": (train.plan, Plan.read),
        "plan_settings": (settings_path(train.plan), read_signature),
        "metadata": (train.metadata_path, lambda path: RecordMetadata.read(path.parent)),
        "verification": (train.verification_path, Verification.read),
        "metrics": (folder.train_folder / "metrics.jsonl", MetricsLine.read_lines),
        "training": (folder.training_result_path, TrainingResult.read),
        "evaluation": (folder.evaluation_result_path, EvaluationResult.read),
        "pipeline": (folder.train_folder / "settings.yaml", _read_yaml_mapping),
        "finetuning": (folder.finetuning_result_path, FineTuning.read),
        "finetuning_lines": (folder.finetune_folder / "metrics.jsonl", FineTuningLine.read_lines),
        "finetuning_pipeline": (folder.finetune_folder / "settings.yaml", _read_yaml_mapping),
        "predictions": (folder.predictions_path, _count_lines),
    }


def _count_lines(path: Path) -> int:
    """Return the number of lines in a file."""
    with explain_os_errors(path, "read"), open_file(path) as handle:
        return sum(block.count(b"\n") for block in iter(lambda: handle.read(2**20), b""))


def _read_yaml_mapping(path: Path) -> dict[str, Any] | None:
    """Read a pipeline file. Return None if the file is not a YAML mapping."""
    pipeline = parse_yaml(read_text(path), str(path))
    return pipeline if isinstance(pipeline, dict) else None


# The files that the report reads, as paths relative to the work folder. The report page shows these paths.
INPUT_NAMES = {key: path.as_posix() for key, (path, _) in _list_input_files(Path()).items()}

_SUFFICIENT_INPUTS = ("examples", "histogram_file", "plan", "metadata", "metrics", "evaluation", "finetuning", "predictions")


@dataclass(frozen=True)
class _ReportInputs:
    """The contents of all files that the report shows. If a file is missing, its field is None.

    `name` is the name of the work folder, and `predictions` is the number of rows in the file of predictions. Every other
    field contains the content of the file that `INPUT_NAMES` lists for it.
    """

    name: str
    examples: PreparedExamples | None
    prepare_settings: Signature | None
    histogram_file: HistogramFile | None
    plan: Plan | None
    plan_settings: Signature | None
    metadata: RecordMetadata | None
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
        """The number of sequences of each length, from metadata.json. If there are no packs yet, it comes from
        histogram.json.
        """
        if self.metadata is not None:
            return Histogram(self.metadata.max_sequence_length, np.array(self.metadata.histogram))
        if self.histogram_file is not None:
            return Histogram(self.histogram_file.max_sequence_length, np.array(self.histogram_file.counts))
        return None

    @property
    def totals(self) -> RecordMetadata | PlanTotals | None:
        """The metrics of the packs or, if there are no packs yet, of the plan."""
        if self.metadata is not None:
            return self.metadata
        return self.plan.totals if self.plan is not None else None

    @property
    def strategy_counts(self) -> dict[tuple[int, ...], int] | None:
        """The number of packs of each strategy (the sequence lengths that share a pack), over all groups of the plan."""
        return self.plan.strategy_counts if self.plan is not None else None


def _read_inputs(workdir: Path) -> _ReportInputs:
    """Read all files that the report needs from a local work folder.

    Raises:
        InputError: The folder does not exist, contains nothing to report on, or contains files that do not match.
    """
    if not workdir.is_dir():
        raise InputError(f"{workdir}: no such folder; pass a work folder, for example work/demo")
    sources = {key: (path, read_file) for key, (path, read_file) in _list_input_files(workdir).items() if path.exists()}
    if not sources.keys() & set(_SUFFICIENT_INPUTS):
        raise InputError(
            f"{workdir}: the folder contains none of the files that a report needs "
            f"({', '.join(INPUT_NAMES[key] for key in _SUFFICIENT_INPUTS)}); run the pipeline first"
        )
    contents = dict.fromkeys(INPUT_NAMES) | {key: read_file(path) for key, (path, read_file) in sources.items()}
    inputs = _ReportInputs(name=workdir.resolve().name, **contents)
    if inputs.metadata is not None and inputs.verification is not None:
        # If the packs were written again, verification.json may belong to the old packs. In this case, raise an error.
        Verification.read_matching(sources["verification"][0], inputs.metadata)
    histogram, plan = inputs.histogram, workdir / INPUT_NAMES["plan"]
    if histogram is not None and histogram.sequences == 0:
        raise InputError(
            f"{plan.parent}: the histogram contains no sequences; create it again from records with at least one sequence"
        )
    largest = max((sum(strategy) for strategy in inputs.strategy_counts or {}), default=0)
    if histogram is not None and largest > histogram.max_sequence_length:
        raise InputError(
            f"{plan}: the plan contains a pack of {largest} tokens, but the histogram is for packs of "
            f"{histogram.max_sequence_length}; create the plan again"
        )
    return inputs


# --- the HTML page


class _MetricCard(NamedTuple):
    """A metric in the summary at the top of the page.

    Attributes:
        name: The name of the metric.
        value: The value as text.
        note: The explanation below the value.
    """

    name: str
    value: str
    note: str


def _render_page(inputs: _ReportInputs) -> str:
    """Return the page as HTML. The same inputs always give the same page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("gaudi_bert.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"metric": _format_metric, "cell": _format_cell}
    pictures = {}
    with use_page_style():
        for name, (figure, words) in _draw_figures(inputs).items():
            svg = b" ".join(add_dark_mode_style(encode_picture(figure, "svg")).split())
            # Embed the SVG as percent-encoded text, which is only slightly longer than the SVG. Base64 would make the page a
            # third larger.
            source = quote(svg, safe=_PLAIN_IN_URLS)
            pictures[name] = Markup(f"<img alt='{escape(words)}' src='data:image/svg+xml,{source}'>")
    return environment.get_template("report.html").render(
        inputs=inputs,
        names=INPUT_NAMES,
        cards=_make_summary_cards(inputs),
        pictures=pictures,
        missing=_describe_missing_files(inputs),
        last=_find_last_training_line(inputs.metrics),
        last_of_task=_find_last_training_line(inputs.finetuning_lines),
        settings=_tabulate_changed_and_default_settings(inputs),
    )


# These characters need no percent-encoding in a data URL inside single quotes. `#`, `%`, `&` and the single quote must be
# encoded.
_PLAIN_IN_URLS = ' !"$()*+,-./:;<=>?@_~'

_Line = TypeVar("_Line", bound=FineTuningLine)


def _find_last_training_line(lines: Sequence[_Line] | None) -> _Line | None:
    """Return the last line that contains training metrics, not evaluation metrics. Return None if there is no such line."""
    return next((line for line in reversed(lines or ()) if line.kind == "train"), None)


def _make_summary_cards(inputs: _ReportInputs) -> list[_MetricCard]:
    """Return the summary cards for the top of the page. Metrics that are not known yet are left out."""
    cards: list[_MetricCard] = []
    histogram, totals = inputs.histogram, inputs.totals
    if histogram is not None:
        slots = histogram.max_sequence_length
        before = histogram.tokens / (histogram.sequences * slots)
        if totals is None:
            cards.append(_MetricCard("Sequences", f"{histogram.sequences:,}", f"of at most {slots} tokens"))
            cards.append(_MetricCard("Efficiency", format_percent(before), "tokens / slots, not packed yet"))
        else:
            packs, bound = totals.packs, totals.lower_bound
            gap, note = packs - bound, f"{bound:,} packs: proven optimal"
            if gap:
                note = f"{format_percent(gap / bound, 2)} above {bound:,}, which is proven" if bound else ""
            packing_note = f"{histogram.sequences:,} sequences in {packs:,} packs"
            efficiency_note = f"tokens / slots; {format_percent(before)} before packing"
            cards += [
                _MetricCard("Packing factor", f"{totals.packing_factor:.3f}", packing_note),
                *_make_speedup_card(inputs, totals.packing_factor),
                _MetricCard("Efficiency", format_percent(totals.efficiency, 2), efficiency_note),
                _MetricCard("Above the bound", f"{gap:,} {'pack' if gap == 1 else 'packs'}", note),
            ]
    if inputs.verification is not None:
        note = f"each of {inputs.verification.sequences:,} sequences is in the packs exactly once"
        cards.append(_MetricCard("Verified", "yes", note))
    return cards + _make_pretraining_accuracy_cards(inputs) + _make_task_cards(inputs)


def _make_speedup_card(inputs: _ReportInputs, packing_factor: float) -> list[_MetricCard]:
    """Return a list with a card for the measured speed-up. If the speed-up was not measured, return an empty list.

    The speed-up is measured on the training device if `training.measure_speedup` is set.

    Args:
        inputs: The input files of the report.
        packing_factor: The number of sequences per pack. The speed-up is compared with this number.
    """
    speedup = inputs.training.realized_speedup if inputs.training is not None else None
    if speedup is None:
        return []
    note = (
        "ratio of packed to padded sequences per second, "
        f"{format_percent(speedup / packing_factor, 0)} of the packing factor"
    )
    plan = inputs.plan
    if speedup < packing_factor and plan is not None and plan.masked_slots:
        note += f"; a pack has {plan.masked_slots} masked slots, but a padded row only {plan.max_predictions}"
    return [_MetricCard("Realized speed-up", f"{speedup:.3f}", note)]


def _make_pretraining_accuracy_cards(inputs: _ReportInputs) -> list[_MetricCard]:
    """Return the cards for the accuracies of the pretrained model. If the model was not evaluated, return an empty list."""
    evaluation = inputs.evaluation
    if evaluation is None:
        return []
    accuracy, baseline = evaluation.masked_lm_accuracy, evaluation.unigram_baseline
    note = "on held-out documents"
    if baseline:
        note = f"{accuracy / baseline:.1f} times the unigram baseline, {format_percent(baseline)}"
    return [
        _MetricCard("Masked-LM accuracy", format_percent(accuracy), note),
        _MetricCard(
            "Next-sentence accuracy",
            format_percent(evaluation.next_sentence_accuracy),
            f"always giving the more frequent answer: {format_percent(evaluation.next_sentence_baseline)}",
        ),
    ]


def _make_task_cards(inputs: _ReportInputs) -> list[_MetricCard]:
    """Return a list with a card for the main metric of the fine-tuned model. If there is no such metric, return an empty
    list.
    """
    summary = inputs.finetuning
    if summary is None or summary.best_metric is None:
        return []
    name = summary.best_metric
    note = f"{summary.task}, {summary.evaluated_rows:,} held-out rows"
    if name in summary.baseline:
        baseline = "before training" if summary.task in SEARCH_TASKS else "always the same answer"
        note += f"; {baseline}: {_format_metric(summary.baseline[name], name)}"
    return [_MetricCard(name.replace("_", " ").capitalize(), _format_metric(summary.metrics[name], name), note)]


def _format_metric(value: float, name: str) -> str:
    """Format the value of a metric. The accuracy is shown as a percentage, and all other metrics as plain numbers, including
    those of SQuAD.
    """
    return format_percent(value) if name == "accuracy" else f"{value:,.4f}"


_CURVE_TITLES = {
    "masked_lm_loss": "Masked-LM loss",
    "masked_lm_accuracy": "Masked-LM accuracy",
    "next_sentence_loss": "Next-sentence loss",
    "next_sentence_accuracy": "Next-sentence accuracy",
}


def _draw_figures(inputs: _ReportInputs) -> dict[str, tuple[Figure, str]]:
    """Draw all pictures that the available files allow. Return a dictionary from the name of each picture to the picture and
    its `alt` text.
    """
    figures: dict[str, tuple[Figure, str]] = {}
    histogram, strategy_counts, totals = inputs.histogram, inputs.strategy_counts, inputs.totals
    if histogram is not None:
        slots = histogram.max_sequence_length
        before, after = histogram.counts, None
        if strategy_counts is not None:  # `after` gets the number of packs with 1, 2, ..., L tokens
            after = np.zeros(slots, dtype=np.int64)
            for strategy, count in strategy_counts.items():
                after[sum(strategy) - 1] += count
        full = [format_percent(int(fills[-1]) / max(int(fills.sum()), 1)) for fills in (before, after) if fills is not None]
        words = f"Bars: share of rows by number of tokens. Before packing, {full[0]} of the rows are full"
        words += f"; after packing, {full[1]}." if len(full) > 1 else "."
        figures["fill"] = draw_row_fill(before, after), words
        if totals is not None:
            figure = draw_slot_usage(histogram.sequences, totals.packs, histogram.tokens, slots, totals.lower_bound)
            words = f"Two bars to scale: {histogram.sequences:,} rows before packing, and {totals.packs:,} after packing."
            figures["slots"] = figure, f"{words} A line marks the proven bound, {totals.lower_bound:,} rows."
        if strategy_counts:
            strategy = max(strategy_counts, key=lambda lengths: (strategy_counts[lengths], lengths))
            words = "Rows to scale, one for each of the most frequent strategies. The most frequent one: "
            words += f"{' + '.join(map(str, sorted(strategy, reverse=True)))} tokens."
            figures["strategies"] = draw_strategy_counts(strategy_counts, slots, max_strategies=12), words
    if inputs.metrics:
        figures |= {name: _draw_metric_curve(inputs, name) for name in _CURVE_TITLES}
    return figures


# The report compares each accuracy with an accuracy that is reached without learning. The keys are the names of accuracies.
# Each value contains the evaluation field of the baseline, and the label of the baseline's line in the picture.
_CURVE_BASELINES = {
    "masked_lm_accuracy": ("unigram_baseline", "unigram baseline"),
    "next_sentence_accuracy": ("next_sentence_baseline", "more frequent answer"),
}


def _draw_metric_curve(inputs: _ReportInputs, name: str) -> tuple[Figure, str]:
    """Draw the values of a metric during training. Return the picture, and a text that states the first and the last value.

    Args:
        inputs: The input files of the report.
        name: The name of the metric, which is a key of `_CURVE_TITLES`.
    """
    is_accuracy = name.endswith("accuracy")
    key, words = _CURVE_BASELINES.get(name, ("", ""))
    value = getattr(inputs.evaluation, key, None)
    training, held_out = (
        [(line.sequences, getattr(line, name)) for line in inputs.metrics or () if line.kind == kind]
        for kind in ("train", "evaluation")
    )
    figure = draw_learning_curve(training, held_out, is_accuracy=is_accuracy, baseline=value and (words, value))
    shown = format_percent if is_accuracy else "{:.3f}".format
    spans = [
        f"{kind} from {shown(points[0][1])} to {shown(points[-1][1])}"
        for kind, points in (("training", training), ("held out", held_out))
        if points
    ]
    return figure, f"{_CURVE_TITLES[name]} by number of sequences: {', '.join(spans)}."


def _describe_missing_files(inputs: _ReportInputs) -> list[str]:
    """List the files that are missing, each with the stage that writes it.

    If a work folder contains only the files of a task, no file is considered missing.
    """
    stages = {"plan": "plan", "metadata": "write", "verification": "verify", "metrics": "train", "evaluation": "evaluate"}
    if inputs.histogram is None and (inputs.finetuning is not None or inputs.predictions is not None):
        return []
    missing = [f"{INPUT_NAMES[key]} (stage {stage})" for key, stage in stages.items() if not getattr(inputs, key)]
    return missing if inputs.histogram is not None else [f"{INPUT_NAMES['histogram_file']} (stage histogram)", *missing]


def _format_cell(value: float | None) -> str:
    """Format a number for a table cell. Return an empty string for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.4f}"


_Tables = list[tuple[str, list[tuple[str, str]]]]


def _tabulate_changed_and_default_settings(inputs: _ReportInputs) -> tuple[_Tables, _Tables]:
    """Divide the settings of the run into two lists of tables, for changed settings and for settings with their default
    values.

    Training stores all settings. Without training, only the settings of the data stages are known.

    Returns:
        The tables of settings that differ from their defaults, and the tables of all other settings. Each table is the title
        of a section, and a list of keys with their values.
    """
    pipeline = inputs.finetuning_pipeline or inputs.pipeline
    if pipeline is not None:
        sections = {name: value for name, value in pipeline.items() if isinstance(value, dict)}
    else:
        stored = {"prepare": inputs.prepare_settings, "packing": inputs.plan_settings}
        sections = {name: dict(value.settings) for name, value in stored.items() if value is not None}
    all_defaults = PipelineSettings().model_dump(mode="json")
    changed: _Tables = []
    unchanged: _Tables = []
    for name, settings in sections.items():
        defaults = all_defaults.get(name, {})
        for tables, is_default in ((changed, False), (unchanged, True)):
            rows = [
                (key, _format_setting(value))
                for key, value in settings.items()
                if (defaults.get(key, value) == value) == is_default
            ]
            tables += [(name, rows)] if rows else []
    return changed, unchanged


def _format_setting(value: Any) -> str:
    """Format the value of a setting for the HTML page. For example, True becomes "yes", and None becomes "none"."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_format_setting(part)}" for key, part in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 100_000 else str(value)
