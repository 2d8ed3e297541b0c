"""The commands for pipelines and machines: init, run, report, settings, wait, doctor, and the group k8s."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gaudi_bert.cli import arguments, output
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import format_location
from gaudi_bert.common.launch import detect_launcher, is_first_process
from gaudi_bert.common.progress import ONLY_RESULT_VARIABLE, Reporter, format_seconds
from gaudi_bert.config.options import check_option_combination

if TYPE_CHECKING:  # `--help` needs no settings, and importing them takes as long as everything else
    from gaudi_bert.artefacts.work_folder import WorkFolder
    from gaudi_bert.config.pipeline import PipelineSettings
    from gaudi_bert.runners.kubernetes.client import Cluster
    from gaudi_bert.runners.local import RunRequest

k8s = typer.Typer(
    cls=output.Commands, name="k8s", help="Show, open or delete a pipeline on a Kubernetes cluster.", rich_markup_mode=None
)


def _run_docker(
    run: RunRequest, stages: Sequence[str], pipeline: Path, overrides: Sequence[str], json: bool
) -> dict[str, list[str]]:
    from gaudi_bert.runners.docker import run_on_docker

    how, flags = run.options, ["--json"] if json else []
    flags += [word for override in overrides for word in ("--set", override)]
    flags += ["--overwrite"] if how.overwrite else []
    flags += ["--finish"] if how.finish else []
    flags += ["--shard", "/".join(map(str, how.part))] if how.part is not None else []
    flags += ["--workers", str(how.workers)] if how.workers is not None else []
    return run_on_docker(run.settings, stages, pipeline, run.work, how.reporter, extra_options=flags)


_RUNNERS = ("local", "docker", "kubernetes")
# The stages that several processes of a launcher such as mpirun can run together. All other stages run in a single process.
_STAGES_OF_A_LAUNCHER = ("train", "evaluate", "finetune")


def run(
    pipeline: arguments.Pipeline,
    stages: Annotated[
        str | None, typer.Option(help="The stages to run, such as plan,write; default: all stages of the pipeline.")
    ] = None,
    on: Annotated[str, typer.Option(metavar=f"[{'|'.join(_RUNNERS)}]", help="Where to run the stages.")] = "local",
    set_: arguments.Set = None,
    work: arguments.Work = Path("work"),
    shard: arguments.Shard = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="Complete the stage `write` or `verify` after all its parts are done.")
    ] = False,
    workers: arguments.Workers = None,
    render: Annotated[
        Path | None, typer.Option(help="Write the Kubernetes manifests to this folder, without running anything.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be done and which files are missing, without running anything."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="With --dry-run, also print every setting.")] = False,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Run the stages of a pipeline, except for those that are already finished."""
    from gaudi_bert.artefacts.work_folder import WorkFolder
    from gaudi_bert.runners.local import RunRequest
    from gaudi_bert.runners.stage_table import list_pipeline_stages, select_stages

    if on not in _RUNNERS:
        raise InputError(f"--on {on}: must be one of {', '.join(_RUNNERS)}")
    settings = arguments.load_pipeline_settings(pipeline, set_)
    requested = list_pipeline_stages(settings)
    if stages is not None:
        requested = [name.strip() for name in stages.split(",") if name.strip()]
    names = select_stages(settings, requested)
    how = arguments.make_stage_run(shard, finish, workers=workers, overwrite=overwrite)
    _check_several_processes_allowed(on, names, how.part)
    if dry_run:
        _print_dry_run(
            settings, names, WorkFolder.from_settings(settings, work, pipeline.parent), pipeline, on, verbose, json
        )
    elif render is not None:
        from gaudi_bert.runners.kubernetes.manifests import write_manifests

        parts = write_manifests(settings, names, render, overwrite)
        lines = [f"{render}: {', '.join(parts)}", *(f"kubectl apply -k {render}/{part}" for part in parts)]
        output.print_result({"folder": str(render), "parts": parts}, json, lines)
    else:
        how = replace(how, reporter=Reporter(quiet=how.part is None and not is_first_process()))
        _run_and_print(RunRequest(settings, work, pipeline.parent, how), names, on, pipeline, set_ or (), json)


def _run_and_print(
    run: RunRequest, stages: Sequence[str], on: str, pipeline: Path, overrides: Sequence[str], json: bool
) -> None:
    from gaudi_bert.runners.local import run_stages

    if on == "docker":
        printed = _run_docker(run, stages, pipeline, overrides, json)
        objects = {stage: loads(lines[-1])[stage] if lines else {} for stage, lines in printed.items()} if json else {}
        output.print_result(objects, json, list(chain(*printed.values())))
    elif on == "kubernetes":
        from gaudi_bert.runners.kubernetes.run import run_on_kubernetes

        how = run.options
        unsupported = {"--overwrite": how.overwrite, "--shard": how.part, "--finish": how.finish, "--workers": how.workers}
        check_option_combination({"--on kubernetes": True, **unsupported})
        steps = run_on_kubernetes(run.settings, stages, how.reporter)
        descriptions = {"done": "done", "skipped": "already complete, nothing to do"}
        output.print_result(steps, json, [f"{step}: {descriptions[state]}" for step, state in steps.items()])
    else:
        results = run_stages(run, stages)
        lines = []
        for stage, result in results.items():
            splits = result if isinstance(result, Mapping) else {"": result}
            for split, output_of_split in splits.items():
                lines += [f"{f'{stage} {split}'.strip()}: {line}" for line in output_of_split.format_lines()]
        # With `--shard`, each process of a launcher such as mpirun computes another part of the output. Therefore each
        # process prints its own result.
        output.print_result(results, json, lines, shared=run.options.part is None)


def _check_several_processes_allowed(runner: str, stages: Sequence[str], shard: tuple[int, int] | None) -> None:
    """If a launcher such as mpirun has started several processes, check that they can run the stages together.

    With `--shard`, each process does its own part, so nothing is checked.

    Args:
        runner: Where the stages run: `local`, `docker` or `kubernetes`.
        stages: The names of the stages.
        shard: The number of the part that this process does and the number of parts, or None without `--shard`.

    Raises:
        InputError: Several processes would run the same stage, each of them completely.
    """
    launch = detect_launcher()
    if launch is None or launch.size == 1 or shard is not None:
        return
    started = f"{launch.launcher} started {launch.size} processes"
    if runner != "local":
        raise InputError(
            f"--on {runner}: {started}, but a single process must start the pipeline; run it without {launch.launcher}"
        )
    alone = [stage for stage in stages if stage not in _STAGES_OF_A_LAUNCHER]
    if alone:
        raise InputError(
            f"{started}, but {', '.join(alone)} must run in a single process; use {launch.launcher} only for "
            f"{', '.join(_STAGES_OF_A_LAUNCHER)}, or set resources.workers, so that `run` starts the processes"
        )


def _print_dry_run(
    settings: PipelineSettings, stages: Sequence[str], folder: WorkFolder, pipeline: Path, on: str, verbose: bool, json: bool
) -> None:
    import yaml

    from gaudi_bert.runners.kubernetes.work_claim import check_volume_access_mode
    from gaudi_bert.runners.stage_table import STAGES, describe_missing_inputs, preview_stage

    if on == "kubernetes":
        check_volume_access_mode(settings)
    previews = [preview_stage(settings, stage) for stage in stages]
    finished = [] if on == "kubernetes" else [name for name in stages if not STAGES[name].list_missing_outputs(folder)]
    missing = [] if on == "kubernetes" else describe_missing_inputs(settings, stages, pipeline.parent)
    root, values = format_location(folder.root), settings.model_dump(mode="json")
    where = {"local": "here", "docker": "in containers here", "kubernetes": "on the cluster"}[on]
    waiting = [stage for stage in stages if stage not in finished]
    lines = [f"work folder: {root}"]
    lines += [f"already finished, and repeated only with --overwrite: {', '.join(finished)}"] if finished else []
    lines += [f"to do {where}: {', '.join(waiting) or 'nothing'}", *(f"MISSING: {path}" for path in missing)]
    if on == "kubernetes":
        each = "  {stage}: {containers} x {image} ({cpu} cpu, {memory}, {cards} cards)"
        lines += [each.format(**preview) for preview in previews]
    elif on == "docker":
        lines += [f"images: {', '.join(dict.fromkeys(preview['image'] for preview in previews))}"]
    changed = ", ".join(_iterate_setting_lines(settings.model_dump(mode="json", exclude_defaults=True)))
    lines += [f"settings that differ from the defaults: {changed or 'none'}"]
    if verbose:
        lines += ["", *yaml.safe_dump(values, sort_keys=False, default_flow_style=None).splitlines()]
    else:
        lines.append("every setting: --verbose")
    planned = {"stages": list(stages), "work": root, "made": finished, "missing": missing}
    output.print_result({**planned, "outlook": previews, "settings": values}, json, lines, shared=True)


def _iterate_setting_lines(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield one line of the form `section.key = value` for each setting.

    Args:
        settings: The settings, in nested sections.
        prefix: The text before each key.
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _iterate_setting_lines(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {value}"


def report(
    workdir: Annotated[Path, typer.Argument(help="A work folder, such as work/demo.", show_default=False)],
    json: arguments.Json = False,
) -> None:
    """Write report.html, a page with the charts and metrics of a work folder."""
    from gaudi_bert.reporting import report

    output.print_result(report.report(workdir), json)


def settings(
    section: Annotated[
        str | None, typer.Argument(help="A section or key, such as packing or training.learning_rate.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the JSON schema of pipeline files, for editors.")] = False,
) -> None:
    """Print the keys of pipeline files with their allowed values, defaults and meanings."""
    from json import dumps

    from gaudi_bert.config.pipeline import build_pipeline_json_schema, format_settings_page

    check_option_combination({"SECTION": section, "--json": json})
    for line in (
        [dumps(build_pipeline_json_schema(), indent=1)]
        if json
        else format_settings_page(section, markdown=not sys.stdout.isatty())
    ):
        typer.echo(line)


def init(
    name: Annotated[str, typer.Argument(help="The name of the pipeline, which is written to NAME.yaml.")] = "my-pipeline",
) -> None:
    """Write a new pipeline file with the keys that most users change. `init retrieval` writes one for embedding models."""
    from gaudi_bert.common.files import write_text
    from gaudi_bert.config.options import fill_pipeline_file_template
    from gaudi_bert.config.pipeline import PipelineSettings, section_from_mapping

    section_from_mapping(PipelineSettings, {"name": name}, "the command line", {"name": name})
    path = Path(f"{name}.yaml")
    if path.exists():
        raise InputError(f"{path}: the file already exists; choose another name, or remove it")
    write_text(path, fill_pipeline_file_template(name))
    typer.echo(f"Wrote {path}; its first lines explain what to change")
    if not os.environ.get(ONLY_RESULT_VARIABLE):
        typer.echo(f"Next: gaudi-bert run {path} --dry-run")


# --- clusters and machines


def wait(
    pipeline: arguments.Pipeline,
    for_: Annotated[
        str,
        typer.Option("--for", help="The step that is about to start, such as train or write-finish.", show_default=False),
    ],
    work: arguments.Work = Path("work"),
    timeout: Annotated[float, typer.Option(min=0, help="Give up after this many seconds.")] = 86_400,
    json: arguments.Json = False,
) -> None:
    """Wait until all inputs of a stage exist. The init containers of pods run this command."""
    from gaudi_bert.artefacts.work_folder import WorkFolder
    from gaudi_bert.runners.local import wait_for_inputs

    folder = WorkFolder.from_settings(arguments.load_pipeline_settings(pipeline, None), work, pipeline.parent)
    seconds = wait_for_inputs(folder, for_, timeout, Reporter())
    output.print_result(
        {"stage": for_, "waited_seconds": round(seconds, 1)},
        json,
        [f"all inputs of {for_} exist ({format_seconds(seconds)})"],
    )


def _load_settings_and_cluster(pipeline: Path, overrides: list[str] | None) -> tuple[PipelineSettings, Cluster]:
    from gaudi_bert.runners.kubernetes.client import Cluster

    settings = arguments.load_pipeline_settings(pipeline, overrides)
    return settings, Cluster(settings.kubernetes.namespace, say=Reporter().say)


@k8s.command(cls=output.Command)
def status(pipeline: arguments.Pipeline, set_: arguments.Set = None, json: arguments.Json = False) -> None:
    """Show the state of each step, and why it failed or waits."""
    from gaudi_bert.runners.kubernetes import manage

    steps = manage.read_step_statuses(*_load_settings_and_cluster(pipeline, set_))
    output.print_result(steps, json, manage.format_step_statuses(steps))


@k8s.command(cls=output.Command)
def logs(
    pipeline: arguments.Pipeline,
    step: Annotated[str | None, typer.Option(help="Show only this step, such as train or write-finish.")] = None,
    set_: arguments.Set = None,
) -> None:
    """Print the logs of a pipeline's pods."""
    from gaudi_bert.runners.kubernetes import manage

    settings, cluster = _load_settings_and_cluster(pipeline, set_)
    manage.show_logs(settings, step, cluster, typer.echo)


@k8s.command(cls=output.Command)
def delete(
    pipeline: arguments.Pipeline,
    data: Annotated[bool, typer.Option("--data", help="Also remove the work folder from its volume or store.")] = False,
    set_: arguments.Set = None,
    json: arguments.Json = False,
) -> None:
    """Remove all Jobs of a pipeline. Its work folder stays, unless you pass --data."""
    from gaudi_bert.runners.kubernetes import manage

    removed = manage.delete_pipeline_objects(*_load_settings_and_cluster(pipeline, set_), delete_data=data)
    output.print_result({"removed": removed}, json, removed or ["nothing to remove"])


@k8s.command("open", cls=output.Command)
def _open(
    pipeline: arguments.Pipeline,
    out: Annotated[
        Path | None, typer.Option(help="The folder to copy the files to; default: opened/NAME.", show_default=False)
    ] = None,
    set_: arguments.Set = None,
    json: arguments.Json = False,
) -> None:
    """Copy the report and the TensorBoard files of a run from the cluster, and open the report in a browser."""
    from gaudi_bert.runners.kubernetes.open_results import copy_results

    settings, cluster = _load_settings_and_cluster(pipeline, set_)
    opened = copy_results(settings, cluster, out or Path("opened") / settings.name, Reporter())
    curves = [f"curves: tensorboard --logdir {opened.tensorboard}"] if opened.tensorboard else []
    output.print_result(opened._asdict(), json, [f"page: {opened.report}", *curves])
    if sys.stdout.isatty():
        import webbrowser

        webbrowser.open(opened.report.resolve().as_uri())


def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the Kubernetes cluster instead of this machine.")
    ] = False,
    pipeline: Annotated[
        Path | None, typer.Option(help="A pipeline file, to check what its settings need; default: the default settings.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Check the access to this folder in an object store instead.")
    ] = None,
    set_: arguments.Set = None,
    json: arguments.Json = False,
) -> None:
    """Check whether this machine, a cluster or a store is ready, and say what to fix."""
    from gaudi_bert.runners.doctor import examine_cluster, examine_host, examine_store

    settings = arguments.load_pipeline_settings(pipeline, set_)
    host: dict[str, Any] = {}
    if store is not None:
        results = [examine_store(store, settings)]
    elif cluster:
        results = examine_cluster(settings, Reporter())
    else:
        results, host = examine_host(settings)
    failed = [result for result in results if result.verdict == "failed"]
    output.print_result(
        {"ready": not failed, "findings": [result.as_json() for result in results], **host},
        json,
        [str(result) for result in results],
    )
    if failed:
        raise FailedError(f"{len(failed)} of {len(results)} checks failed; to fix the first one: {failed[0].remedy}")
