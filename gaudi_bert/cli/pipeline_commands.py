"""Commands about pipelines: init, run, report, settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gaudi_bert.artefacts.store.objects import shown_location
from gaudi_bert.cli import arguments, output
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.launch import find_launch, is_first_process
from gaudi_bert.common.progress import RESULT_ALONE, Reporter

if TYPE_CHECKING:  # settings take as long to load as everything else, and `--help` needs none
    from gaudi_bert.artefacts.work_folder import WorkFolder
    from gaudi_bert.config.pipeline import PipelineSettings
    from gaudi_bert.runners.stage_calls import RunRequest


def _run_local(run: RunRequest, stages: Sequence[str], pipeline: Path) -> object:
    from gaudi_bert.runners.local import run_stages

    return run_stages(run, stages)


def _run_docker(run: RunRequest, stages: Sequence[str], pipeline: Path) -> object:
    from gaudi_bert.runners.docker.run import run_on_docker

    flags = ["--overwrite"] if run.overwrite else []
    flags += ["--finish"] if run.finish else []
    flags += ["--shard", "/".join(map(str, run.shard))] if run.shard is not None else []
    flags += ["--workers", str(run.workers)] if run.workers is not None else []
    return run_on_docker(run.settings, stages, pipeline, run.work, run.reporter, flags=flags)


def _run_kubernetes(run: RunRequest, stages: Sequence[str], pipeline: Path) -> object:
    from gaudi_bert.runners.kubernetes.run import run_on_kubernetes

    if run.overwrite:
        raise InputError(
            "--overwrite: not on a cluster, where pods would remove one another's files; "
            "run `gaudi-bert k8s delete PIPELINE --data` first, or give the pipeline another name"
        )
    if run.shard is not None or run.finish or run.workers is not None:
        raise InputError(
            "--shard, --finish and --workers: on a cluster, set resources.data_workers and resources.data_processes instead"
        )
    return run_on_kubernetes(run.settings, stages, run.reporter)


def _describe_stages(summaries: Mapping[str, Any]) -> list[str]:
    """A few lines per stage, and per split where a stage has two: its result, and whether it had anything to do."""
    from gaudi_bert.artefacts.work_folder import SPLITS

    lines = []
    for stage, summary in summaries.items():
        splits = summary if summary and summary.keys() <= set(SPLITS) else {"": summary}
        for split, figures in splits.items():
            title = f"{stage} {split}".strip()
            lines += [f"{title}: {line}" for line in output.STAGES[stage](figures)]
    return lines


def _describe_steps(steps: Mapping[str, str]) -> list[str]:
    words = {"done": "done", "skipped": "was complete already, nothing to do"}
    return [f"{step}: {words[state]}" for step, state in steps.items()]


# Where a pipeline runs, by name; and what its result is described by.
_RUNNERS = {
    "local": (_run_local, _describe_stages),
    "docker": (_run_docker, _describe_stages),
    "kubernetes": (_run_kubernetes, _describe_steps),
}
# What all processes of a launcher do together.
_STAGES_OF_A_LAUNCHER = ("train", "evaluate", "finetune")


def run(
    pipeline: arguments.Pipeline,
    stages: Annotated[
        str | None, typer.Option(help="Which stages, e.g. plan,write.", show_default="all stages of the pipeline")
    ] = None,
    on: Annotated[str, typer.Option(help=f"Where: {', '.join(_RUNNERS)}.")] = "local",
    set_: arguments.Set = None,
    work: arguments.Work = Path("work"),
    shard: arguments.Shard = None,
    finish: Annotated[bool, typer.Option("--finish", help="Finish `write` or `verify` after all its shards.")] = False,
    workers: arguments.Workers = None,
    render: Annotated[Path | None, typer.Option(help="Write the Kubernetes manifests to this folder; run nothing.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and what is missing.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="With --dry-run: also print every setting.")] = False,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Run the stages of a pipeline file; finished stages are skipped."""
    from gaudi_bert.artefacts.work_folder import WorkFolder
    from gaudi_bert.runners.stage_calls import RunRequest
    from gaudi_bert.runners.stage_table import check_stages, select_stages, stages_of

    if on not in _RUNNERS:
        raise InputError(f"--on {on}: choose one of {', '.join(_RUNNERS)}")
    settings = arguments.pipeline_settings(pipeline, set_)
    requested = stages_of(settings) if stages is None else [name.strip() for name in stages.split(",") if name.strip()]
    names = select_stages(requested)
    check_stages(settings, names)
    part = arguments.parse_shard(shard, finish)
    _check_launch(on, names, part)
    if dry_run:
        _show_dry_run(settings, names, WorkFolder.of(settings, work, pipeline.parent), pipeline, on, verbose, json)
    elif render is not None:
        _render(settings, names, render, overwrite, json)
    else:
        runner, describe = _RUNNERS[on]
        reporter = Reporter(quiet=part is None and not is_first_process())
        options: dict[str, Any] = {"overwrite": overwrite, "shard": part, "finish": finish, "workers": workers}
        request = RunRequest(settings, work, pipeline.parent, reporter, **options)
        # With --shard, each process of a launcher does its own part.
        show = output.print_shared_result if part is None else output.print_result
        show(runner(request, names, pipeline), json, describe)


def _check_launch(on: str, stages: Sequence[str], shard: tuple[int, int] | None) -> None:
    """Refuse what each process of a launcher would do by itself; with --shard, each does its own part."""
    launch = find_launch()
    if launch is None or launch.size == 1 or shard is not None:
        return
    started = f"{launch.launcher} started {launch.size} processes"
    if on != "local":
        raise InputError(f"--on {on}: {started}, but one is enough; leave out {launch.launcher}")
    alone = [stage for stage in stages if stage not in _STAGES_OF_A_LAUNCHER]
    if alone:
        raise InputError(
            f"{started}, but one process does {', '.join(alone)}: run these without {launch.launcher}, and with it only "
            f"{', '.join(_STAGES_OF_A_LAUNCHER)}; or leave it out and set resources.workers, and `run` starts the processes"
        )


def _show_dry_run(
    settings: PipelineSettings, stages: Sequence[str], folder: WorkFolder, pipeline: Path, on: str, verbose: bool, json: bool
) -> None:
    import yaml

    from gaudi_bert.runners.kubernetes.run import check_access_mode
    from gaudi_bert.runners.stage_table import STAGES, missing_paths, preview_stage

    if on == "kubernetes":
        check_access_mode(settings)
    previews = [preview_stage(settings, stage) for stage in stages]
    finished = [] if on == "kubernetes" else [name for name in stages if not STAGES[name].missing_products(folder)]
    planned: dict[str, Any] = {
        "stages": list(stages),
        "work": shown_location(folder.root),
        "made": finished,
        "missing": [] if on == "kubernetes" else missing_paths(settings, stages, pipeline.parent),
        "outlook": previews,
        "settings": settings.model_dump(mode="json"),
    }
    lines = _dry_run_lines(planned, on)
    if on == "kubernetes":
        lines += [f"  {stage}" for stage in previews]
    elif on == "docker":
        lines += [f"images: {', '.join(dict.fromkeys(stage.image for stage in previews))}"]
    changed = ", ".join(_flat(settings.model_dump(mode="json", exclude_defaults=True)))
    lines += [f"settings that are not the defaults: {changed or 'none'}"]
    if verbose:
        text = yaml.safe_dump(planned["settings"], sort_keys=False, default_flow_style=None)
        lines += ["", *text.splitlines()]
    else:
        lines.append("every setting: --verbose")
    output.print_shared_result(planned, json, lambda _: lines)


def _dry_run_lines(planned: Mapping[str, Any], on: str) -> list[str]:
    """Where the work goes, which stages there are, and what they lack."""
    where = {"local": "here", "docker": "in containers here", "kubernetes": "on the cluster"}[on]
    waiting = [stage for stage in planned["stages"] if stage not in planned["made"]]
    lines = [f"work folder: {planned['work']}"]
    if planned["made"]:
        lines.append(f"finished already, repeated only with --overwrite: {', '.join(planned['made'])}")
    lines.append(f"to do {where}: {', '.join(waiting) or 'nothing'}")
    return lines + [f"MISSING: {path}" for path in planned["missing"]]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Each setting as `section.key = value`."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {value}"


def _render(settings: PipelineSettings, stages: Sequence[str], folder: Path, overwrite: bool, json: bool) -> None:
    from gaudi_bert.runners.kubernetes.run import write_rendered

    parts = write_rendered(settings, stages, folder, overwrite)
    lines = [f"{folder}: {', '.join(parts)}", *(f"kubectl apply -k {folder}/{part}" for part in parts)]
    output.print_result({"folder": str(folder), "parts": parts}, json, lambda _: lines)


def report(
    workdir: Annotated[Path, typer.Argument(help="A work folder, e.g. work/demo.", show_default=False)],
    json: arguments.Json = False,
) -> None:
    """Write report.html: one page with the charts and figures of a work folder."""
    from gaudi_bert.reporting import report

    output.print_result(report.report(workdir), json, output.describe_report)


def settings(
    section: Annotated[str | None, typer.Argument(help="One section: prepare, packing, training, ...")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the JSON schema of a pipeline file, for editors.")] = False,
) -> None:
    """Print every key of a pipeline file: allowed values, default, meaning."""
    from json import dumps

    from gaudi_bert.config.pipeline import settings_page, settings_schema

    if json and section is not None:
        raise InputError(f"{section}: --json prints the schema of all sections; leave the section out")
    for line in [dumps(settings_schema(), indent=1)] if json else settings_page(section):
        typer.echo(line)


def init(
    name: Annotated[str, typer.Argument(help="The pipeline's name, and that of the file: NAME.yaml.")] = "my-pipeline",
) -> None:
    """Write a pipeline file with the keys that most pipelines set, each with a comment."""
    from gaudi_bert.common.files import write_text
    from gaudi_bert.config.pipeline import PipelineSettings, section_from_mapping
    from gaudi_bert.config.shipped import new_pipeline

    section_from_mapping(PipelineSettings, {"name": name}, "the command line", {"name": name})
    path = Path(f"{name}.yaml")
    if path.exists():
        raise InputError(f"{path}: exists already; give another name, or remove it")
    write_text(path, new_pipeline(name))
    typer.echo(f"Wrote {path}; its first lines say what to change")
    if not os.environ.get(RESULT_ALONE):
        typer.echo(f"Next: gaudi-bert run {path} --dry-run")
