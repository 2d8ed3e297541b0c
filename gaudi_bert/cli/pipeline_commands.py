"""Commands about whole pipelines: run and report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gaudi_bert.cli import arguments, output
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import STAGES
from gaudi_bert.stages.layout import SPLITS

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    app.command()(run)
    app.command()(report)


def run(
    pipeline: Annotated[Path, typer.Argument(help="A pipeline file, e.g. pipelines/demo.yaml.", show_default=False)],
    stages: Annotated[str, typer.Option(help="Which stages, in the pipeline's order.")] = ",".join(STAGES),
    set_: arguments.Set = None,
    work: Annotated[Path, typer.Option(help="Where the work folders of pipelines lie.")] = Path("work"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the settings and stages, do nothing.")] = False,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Run the stages of a pipeline file; what is finished already is not done again."""
    from gaudi_bert.runners.local import LocalRun, plan_stages, run_stages

    settings = arguments.pipeline_settings(pipeline, set_)
    names = plan_stages([name.strip() for name in stages.split(",") if name.strip()])
    if dry_run:
        planned = {"stages": names, "work": str(work / settings.name), "settings": settings.model_dump(mode="json")}
        output.print_result(planned, json, _describe_dry_run)
        return
    local = LocalRun(settings, work, pipeline.parent, Reporter(), overwrite=overwrite)
    output.print_result(run_stages(local, names), json, _describe_run)


def _describe_dry_run(planned: Mapping[str, Any]) -> list[str]:
    import yaml

    settings = yaml.safe_dump(planned["settings"], sort_keys=False, default_flow_style=None)
    return [f"stages: {', '.join(planned['stages'])}", f"work folder: {planned['work']}", *settings.splitlines()]


def _describe_run(summaries: Mapping[str, Any]) -> list[str]:
    """One or a few lines a stage: what is there now, and whether anything had to be done."""
    lines = []
    for stage, summary in summaries.items():
        splits = summary if summary.keys() <= set(SPLITS) else {"": summary}
        for split, figures in splits.items():
            title = f"{stage} {split}".strip()
            lines += [f"{title}: {line}" for line in _describe_stage(stage, figures)]
    return lines


def _describe_stage(stage: str, figures: Mapping[str, Any]) -> list[str]:
    if stage == "prepare":
        return output.describe_examples(figures)
    if stage == "histogram":
        return output.describe_histogram(figures)
    if stage in ("plan", "write"):
        return output.describe_packing(figures)
    if stage == "verify":
        return [
            f"every one of {figures['sequences']:,} sequences is there exactly once{output.skipped_note(figures)}",
        ]
    return output.describe_any(figures)


def report(
    workdir: Annotated[Path, typer.Argument(help="A work folder, e.g. work/demo.", show_default=False)],
    json: arguments.Json = False,
) -> None:
    """Write report.html: one page with the pictures and figures of a work folder."""
    from gaudi_bert.stages.report import report as make

    output.print_result(make(workdir, reporter=Reporter()), json, output.describe_any)
