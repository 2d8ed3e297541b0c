"""Commands about clusters and hosts: wait, k8s status | logs | open | delete, doctor."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gaudi_bert.cli import arguments, output
from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.progress import Reporter

if TYPE_CHECKING:
    from gaudi_bert.runners.kubernetes.manage import StepStatus
    from gaudi_bert.runners.kubernetes.results import OpenedResults

__all__ = ["register"]

Pipeline = Annotated[Path, typer.Argument(help="A pipeline file, e.g. pipelines/demo.yaml.", show_default=False)]

k8s = typer.Typer(
    name="k8s", help="What a pipeline has on a Kubernetes cluster.", no_args_is_help=True, rich_markup_mode=None
)


def register(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    app.command()(wait)
    app.command()(doctor)
    for command in (status, logs, delete):
        k8s.command()(command)
    k8s.command("open")(open_)
    app.add_typer(k8s)


def wait(
    pipeline: Pipeline,
    for_: Annotated[str, typer.Option("--for", help="The stage that is to start, or write-finish.", show_default=False)],
    work: Annotated[Path, typer.Option(help="Where the work folders of pipelines lie.")] = Path("work"),
    timeout: Annotated[float, typer.Option(min=0, help="Seconds after which to give up.")] = 86_400,
    json: arguments.Json = False,
) -> None:
    """Wait until all that a stage needs has been made."""
    from gaudi_bert.artefacts.work_folder import WorkFolder
    from gaudi_bert.runners.waiting import wait_for_inputs

    settings = arguments.pipeline_settings(pipeline, None)
    folder = WorkFolder.of(settings, work, pipeline.parent)
    seconds = wait_for_inputs(folder, for_, timeout, Reporter(), store=settings.store)
    output.print_result({"stage": for_, "waited_seconds": round(seconds, 1)}, json, output.describe_any)


def status(pipeline: Pipeline, set_: arguments.Set = None, json: arguments.Json = False) -> None:
    """Show the state of each step, and what is wrong with it."""
    from gaudi_bert.runners.kubernetes import manage
    from gaudi_bert.runners.kubernetes.client import Cluster

    settings = arguments.pipeline_settings(pipeline, set_)
    found = manage.status(settings, Cluster(settings.kubernetes.namespace))
    output.print_result({step: one.as_json() for step, one in found.items()}, json, lambda _: _describe_status(found))


def _describe_status(found: Mapping[str, StepStatus]) -> list[str]:
    lines = []
    for step, status in found.items():
        pods = ", ".join(f"{count} {phase}" for phase, count in status.pods.items())
        lines.append(f"{step}: {status.state}" + (f" ({pods})" if pods else ""))
        if status.problem:
            lines.append(f"  {status.problem}")
    return lines


def logs(
    pipeline: Pipeline,
    step: Annotated[str | None, typer.Option(help="One step only, e.g. train or write-finish.")] = None,
    set_: arguments.Set = None,
) -> None:
    """Show the logs of a pipeline's pods."""
    from gaudi_bert.runners.kubernetes import manage
    from gaudi_bert.runners.kubernetes.client import Cluster

    settings = arguments.pipeline_settings(pipeline, set_)
    manage.show_logs(settings, step, Cluster(settings.kubernetes.namespace), typer.echo)


def open_(
    pipeline: Pipeline,
    out: Annotated[
        Path | None, typer.Option(help="The folder for the files; default: opened/NAME.", show_default=False)
    ] = None,
    set_: arguments.Set = None,
    json: arguments.Json = False,
) -> None:
    """Bring the page and TensorBoard's files of a run here, and open the page in a browser."""
    from gaudi_bert.runners.kubernetes.client import Cluster
    from gaudi_bert.runners.kubernetes.results import open_results

    settings = arguments.pipeline_settings(pipeline, set_)
    folder = out if out is not None else Path("opened") / settings.name
    found = open_results(settings, Cluster(settings.kubernetes.namespace), folder, Reporter())
    output.print_result(found.as_json(), json, lambda _: _describe_opened(found))
    if sys.stdout.isatty():
        import webbrowser

        webbrowser.open(found.report.resolve().as_uri())


def _describe_opened(found: OpenedResults) -> list[str]:
    lines = [f"page: {found.report}"]
    return lines if found.tensorboard is None else [*lines, f"curves: tensorboard --logdir {found.tensorboard}"]


def delete(
    pipeline: Pipeline,
    data: Annotated[bool, typer.Option("--data", help="Remove the work folder, too: volume or objects.")] = False,
    set_: arguments.Set = None,
    json: arguments.Json = False,
) -> None:
    """Remove all Jobs of a pipeline; its work folder stays, unless you say --data."""
    from gaudi_bert.runners.kubernetes import manage
    from gaudi_bert.runners.kubernetes.client import Cluster

    settings = arguments.pipeline_settings(pipeline, set_)
    removed = manage.delete(settings, Cluster(settings.kubernetes.namespace), data=data)
    output.print_result({"removed": removed}, json, lambda result: result["removed"] or ["nothing was there"])


def doctor(
    cluster: Annotated[bool, typer.Option("--cluster", help="Look at the cluster, not at this machine.")] = False,
    pipeline: Annotated[Path | None, typer.Option(help="A pipeline file that must fit; default: all defaults.")] = None,
    graph: Annotated[Path | None, typer.Option(metavar="PIPELINE", help="Look at a pipeline's training step.")] = None,
    work: Annotated[Path, typer.Option(help="Where the work folders of pipelines lie.")] = Path("work"),
    store: Annotated[str | None, typer.Option(metavar="URL", help="Look at a place in an object store.")] = None,
    set_: arguments.Set = None,
    json: arguments.Json = False,
) -> None:
    """Say whether all is ready for Gaudi, and what to mend."""
    from gaudi_bert.runners.doctor.readiness import examine_cluster, examine_host, examine_store

    if graph is not None:
        _examine_graph(graph, work, set_, json)
        return
    settings = arguments.pipeline_settings(pipeline, set_)
    if store is not None:
        results = [examine_store(store, settings)]
    else:
        results = examine_cluster(settings) if cluster else examine_host(settings)
    wrong = [result for result in results if result.verdict == "mend"]
    printed = {"ready": not wrong, "findings": [result.as_json() for result in results]}
    output.print_result(printed, json, lambda _: [str(result) for result in results])
    if wrong:
        raise FailedError(f"{len(wrong)} of {len(results)} checks need mending, the first: {wrong[0].remedy}")


def _examine_graph(pipeline: Path, work: Path, overrides: list[str] | None, json: bool) -> None:
    from gaudi_bert.artefacts.work_folder import WorkFolder
    from gaudi_bert.stages.training.check_graph import check_graph, describe_graph

    settings = arguments.pipeline_settings(pipeline, overrides)
    result = check_graph(settings, WorkFolder.of(settings, work, pipeline.parent))
    output.print_result(result, json, lambda _: describe_graph(result))
    problems = result.report.problems
    if problems:
        first = f"{problems[0].type}, {problems[0].kind}"
        raise FailedError(f"{pipeline}: not fit for Gaudi: {len(problems)} problems, the first: {first}")
