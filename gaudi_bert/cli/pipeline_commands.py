"""Commands about whole pipelines: run and report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gaudi_bert.artefacts.store.location import shown_place
from gaudi_bert.cli import arguments, output
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter

if TYPE_CHECKING:  # settings take as long to load as all the rest, and `--help` needs none
    from gaudi_bert.config import PipelineSettings

__all__ = ["register"]


@dataclass(frozen=True)
class RunRequest:
    """What `run` was asked for."""

    settings: PipelineSettings
    stages: Sequence[str]
    pipeline: Path
    work: Path
    shard: tuple[int, int] | None
    finish: bool
    workers: int | None
    overwrite: bool
    json: bool


def register(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    app.command()(run)
    app.command()(report)
    app.command()(settings)


def _run_local(request: RunRequest) -> None:
    from gaudi_bert.runners.local import LocalRun, run_stages

    local = LocalRun(
        request.settings,
        request.work,
        request.pipeline.parent,
        Reporter(),
        overwrite=request.overwrite,
        shard=request.shard,
        finish=request.finish,
        workers=request.workers,
    )
    describe = _describe_run if request.shard is None else _describe_shard
    output.print_result(run_stages(local, request.stages), request.json, describe)


def _run_docker(request: RunRequest) -> None:
    from gaudi_bert.runners.docker.run import run_on_docker

    flags = ["--overwrite"] if request.overwrite else []
    flags += ["--finish"] if request.finish else []
    flags += ["--shard", "/".join(map(str, request.shard))] if request.shard is not None else []
    flags += ["--workers", str(request.workers)] if request.workers is not None else []
    result = run_on_docker(request.settings, request.stages, request.pipeline, request.work, Reporter(), flags=flags)
    describe = _describe_run if request.shard is None else _describe_shard
    output.print_result(result, request.json, describe)


def _run_kubernetes(request: RunRequest) -> None:
    from gaudi_bert.runners.kubernetes.run import run_on_kubernetes

    if request.overwrite:
        raise InputError(
            "--overwrite: not on a cluster, where pods would remove one another's files; "
            "run `gaudi-bert k8s delete PIPELINE --data` first, or give the pipeline another name"
        )
    if request.shard is not None or request.finish or request.workers is not None:
        raise InputError(
            "--shard, --finish and --workers: on a cluster, resources.data_workers and resources.data_processes say this"
        )
    result = run_on_kubernetes(request.settings, request.stages, Reporter())
    output.print_result(result, request.json, output.describe_any)


def _render(settings: PipelineSettings, stages: Sequence[str], folder: Path, json: bool) -> None:
    from gaudi_bert.runners.kubernetes.rendering import write_rendered

    parts = write_rendered(settings, stages, folder)
    output.print_result({"folder": str(folder), "parts": parts}, json, _describe_rendered)


def _describe_rendered(result: Mapping[str, Any]) -> list[str]:
    folder = result["folder"]
    return [f"{folder}: {', '.join(result['parts'])}", *(f"kubectl apply -k {folder}/{part}" for part in result["parts"])]


# Where a pipeline runs, by name.
RUNNERS: dict[str, Callable[[RunRequest], None]] = {
    "local": _run_local,
    "docker": _run_docker,
    "kubernetes": _run_kubernetes,
}


def run(
    pipeline: Annotated[Path, typer.Argument(help="A pipeline file, e.g. pipelines/demo.yaml.", show_default=False)],
    stages: Annotated[
        str | None, typer.Option(help="Which stages, e.g. plan,write.", show_default="all that the pipeline has")
    ] = None,
    on: Annotated[str, typer.Option(help=f"Where: {', '.join(RUNNERS)}.")] = "local",
    set_: arguments.Set = None,
    work: Annotated[Path, typer.Option(help="Where the work folders of pipelines lie.")] = Path("work"),
    shard: arguments.Shard = None,
    finish: Annotated[bool, typer.Option("--finish", help="Put together what all shards of `write` made.")] = False,
    workers: arguments.Workers = None,
    render: Annotated[Path | None, typer.Option(help="Write the Kubernetes manifests to this folder, run nothing.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the settings and stages, do nothing.")] = False,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Run the stages of a pipeline file; what is finished already is not done again."""
    from gaudi_bert.runners.stage_table import check_stages, select_stages, stages_of

    if on not in RUNNERS:
        raise InputError(f"--on {on}: choose one of {', '.join(RUNNERS)}")
    settings = arguments.pipeline_settings(pipeline, set_)
    asked = stages_of(settings) if stages is None else [name.strip() for name in stages.split(",") if name.strip()]
    names = select_stages(asked)
    check_stages(settings, names)
    if dry_run:
        _show_dry_run(settings, names, work, pipeline.parent, json)
        return
    if render is not None:
        _render(settings, names, render, json)
        return
    request = RunRequest(settings, names, pipeline, work, arguments.parse_shard(shard), finish, workers, overwrite, json)
    RUNNERS[on](request)


def _show_dry_run(settings: PipelineSettings, stages: Sequence[str], work: Path, pipeline_folder: Path, json: bool) -> None:
    from gaudi_bert.runners.preview import preview_stages

    previews = preview_stages(settings, stages, work, pipeline_folder)
    planned = {
        "stages": list(stages),
        "work": shown_place(work / settings.name),
        "outlook": [stage.as_json() for stage in previews],
        "settings": settings.model_dump(mode="json"),
    }
    output.print_result(planned, json, lambda value: _describe_dry_run(value, [str(stage) for stage in previews]))


def _describe_dry_run(planned: Mapping[str, Any], steps: Sequence[str]) -> list[str]:
    import yaml

    settings = yaml.safe_dump(planned["settings"], sort_keys=False, default_flow_style=None)
    return [f"work folder: {planned['work']}", *steps, "", *settings.splitlines()]


def _describe_run(summaries: Mapping[str, Any]) -> list[str]:
    """One or a few lines per stage: what is there now, and whether anything had to be done."""
    from gaudi_bert.artefacts.work_folder import SPLITS

    lines = []
    for stage, summary in summaries.items():
        splits = summary if summary.keys() <= set(SPLITS) else {"": summary}
        for split, figures in splits.items():
            title = f"{stage} {split}".strip()
            lines += [f"{title}: {line}" for line in _describe_stage(stage, figures)]
    return lines


def _describe_shard(summaries: Mapping[str, Any]) -> list[str]:
    """One line per figure of one shard's part."""
    from gaudi_bert.artefacts.work_folder import SPLITS

    lines = []
    for stage, summary in summaries.items():
        splits = summary if summary.keys() <= set(SPLITS) else {"": summary}
        for split, figures in splits.items():
            lines += [f"{stage} {split}".strip() + f": {line}" for line in output.describe_any(figures)]
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
    if stage == "finetune":
        return output.describe_finetuning(figures)
    if stage == "predict":
        return output.describe_answers(figures)
    return output.describe_any(figures)


def report(
    workdir: Annotated[Path, typer.Argument(help="A work folder, e.g. work/demo.", show_default=False)],
    json: arguments.Json = False,
) -> None:
    """Write report.html: one page with the pictures and figures of a work folder."""
    from gaudi_bert.stages.report import report as make

    output.print_result(make(workdir, reporter=Reporter()), json, output.describe_any)


def settings() -> None:
    """Print every key of a pipeline file: what it may be, its default, what it means."""
    from gaudi_bert.cli.settings_reference import settings_page

    for line in settings_page():
        typer.echo(line)
