"""Commands about clusters and machines: wait, k8s status | logs | open | delete, doctor."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gaudi_bert.cli import arguments, help, output
from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.progress import Reporter, count_of, human_seconds

if TYPE_CHECKING:  # `--help` needs neither
    from gaudi_bert.config.pipeline import PipelineSettings
    from gaudi_bert.runners.kubernetes.client import Cluster

k8s = typer.Typer(
    cls=help.Commands, name="k8s", help="Look after a pipeline on a Kubernetes cluster.", rich_markup_mode=None
)


def wait(
    pipeline: arguments.Pipeline,
    for_: Annotated[str, typer.Option("--for", help="The stage that is to start, or write-finish.", show_default=False)],
    work: arguments.Work = Path("work"),
    timeout: Annotated[float, typer.Option(min=0, help="Give up after this many seconds.")] = 86_400,
    json: arguments.Json = False,
) -> None:
    """Wait until all inputs of a stage exist."""
    from gaudi_bert.artefacts.work_folder import WorkFolder
    from gaudi_bert.runners.local import wait_for_inputs

    settings = arguments.pipeline_settings(pipeline, None)
    folder = WorkFolder.of(settings, work, pipeline.parent)
    seconds = wait_for_inputs(folder, for_, timeout, Reporter())
    waited = {"stage": for_, "waited_seconds": round(seconds, 1)}
    output.print_result(waited, json, lambda _: [f"all inputs of {for_} exist ({human_seconds(seconds)})"])


def _settings_and_cluster(pipeline: Path, overrides: list[str] | None) -> tuple[PipelineSettings, Cluster]:
    from gaudi_bert.runners.kubernetes.client import Cluster

    settings = arguments.pipeline_settings(pipeline, overrides)
    return settings, Cluster(settings.kubernetes.namespace)


@k8s.command(cls=help.Command)
def status(pipeline: arguments.Pipeline, set_: arguments.Set = None, json: arguments.Json = False) -> None:
    """Show the state of each step, and what is wrong with it."""
    from gaudi_bert.runners.kubernetes import manage

    steps = manage.status(*_settings_and_cluster(pipeline, set_))
    output.print_result({name: step.as_json() for name, step in steps.items()}, json, _describe_status)


def _describe_status(steps: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, step in steps.items():
        pods = ", ".join(f"{count} {phase}" for phase, count in step.get("pods", {}).items())
        lines.append(f"{name}: {step['state']}" + (f" ({pods})" if pods else ""))
        if step.get("problem"):
            lines.append(f"  {step['problem']}")
    return lines


@k8s.command(cls=help.Command)
def logs(
    pipeline: arguments.Pipeline,
    step: Annotated[str | None, typer.Option(help="One step only, e.g. train or write-finish.")] = None,
    set_: arguments.Set = None,
) -> None:
    """Show the logs of a pipeline's pods."""
    from gaudi_bert.runners.kubernetes import manage

    settings, cluster = _settings_and_cluster(pipeline, set_)
    manage.show_logs(settings, step, cluster, typer.echo)


@k8s.command(cls=help.Command)
def delete(
    pipeline: arguments.Pipeline,
    data: Annotated[
        bool, typer.Option("--data", help="Also remove the work folder, on its volume or in its store.")
    ] = False,
    set_: arguments.Set = None,
    json: arguments.Json = False,
) -> None:
    """Remove all Jobs of a pipeline; its work folder stays unless you add --data."""
    from gaudi_bert.runners.kubernetes import manage

    removed = manage.delete(*_settings_and_cluster(pipeline, set_), data=data)
    output.print_result({"removed": removed}, json, lambda result: result["removed"] or ["there was nothing to remove"])


@k8s.command("open", cls=help.Command)
def open_(
    pipeline: arguments.Pipeline,
    out: Annotated[
        Path | None, typer.Option(help="The folder for the files; default: opened/NAME.", show_default=False)
    ] = None,
    set_: arguments.Set = None,
    json: arguments.Json = False,
) -> None:
    """Fetch the report and TensorBoard's files of a run, and open the report in a browser."""
    from gaudi_bert.runners.kubernetes.results import open_results

    settings, cluster = _settings_and_cluster(pipeline, set_)
    opened = open_results(settings, cluster, out or Path("opened") / settings.name, Reporter())
    output.print_result(opened, json, _describe_opened)
    if sys.stdout.isatty():
        import webbrowser

        webbrowser.open(opened.report.resolve().as_uri())


def _describe_opened(opened: Mapping[str, Any]) -> list[str]:
    lines = [f"page: {opened['report']}"]
    return lines if opened["tensorboard"] is None else [*lines, f"curves: tensorboard --logdir {opened['tensorboard']}"]


def doctor(
    cluster: Annotated[bool, typer.Option("--cluster", help="Check the cluster, not this machine.")] = False,
    pipeline: Annotated[Path | None, typer.Option(help="A pipeline file that must fit; default: all defaults.")] = None,
    graph: Annotated[Path | None, typer.Option(metavar="PIPELINE", help="Check a pipeline's training step.")] = None,
    work: arguments.Work = Path("work"),
    store: Annotated[str | None, typer.Option(metavar="URL", help="Check a folder in an object store.")] = None,
    set_: arguments.Set = None,
    json: arguments.Json = False,
) -> None:
    """Check whether everything is ready for Gaudi, and say what to fix."""
    from gaudi_bert.runners.doctor.checks import examine_store
    from gaudi_bert.runners.doctor.cluster import examine_cluster
    from gaudi_bert.runners.doctor.host import ask_host, check_host

    if graph is not None:
        _check_graph(graph, work, set_, json)
        return
    settings = arguments.pipeline_settings(pipeline, set_)
    facts: dict[str, Any] = {}
    if store is not None:
        results = [examine_store(store, settings)]
    elif cluster:
        results = examine_cluster(settings)
    else:
        answers = ask_host()
        results, facts = check_host(answers, settings), answers.as_json()
    wrong = [result for result in results if result.verdict == "failed"]
    printed = {"ready": not wrong, "findings": [result.as_json() for result in results], **facts}
    output.print_result(printed, json, lambda _: [str(result) for result in results])
    if wrong:
        raise FailedError(f"{len(wrong)} of {len(results)} checks failed; the first remedy: {wrong[0].remedy}")


def _check_graph(pipeline: Path, work: Path, overrides: list[str] | None, json: bool) -> None:
    from gaudi_bert.artefacts.work_folder import WorkFolder
    from gaudi_bert.training.check_graph import check_graph, describe_graph

    settings = arguments.pipeline_settings(pipeline, overrides)
    result = check_graph(settings, WorkFolder.of(settings, work, pipeline.parent))
    output.print_result(result, json, lambda _: describe_graph(result))
    problems = result.report.problems
    if problems:
        first = f"{problems[0].type}, {problems[0].kind}"
        raise FailedError(f"{pipeline}: not fit for Gaudi: {count_of(len(problems), 'problem')}, the first: {first}")
