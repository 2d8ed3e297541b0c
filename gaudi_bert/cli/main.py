"""The `gaudi-bert` command: all subcommands in one place.

Exit codes: 0 all done, 1 failed, 2 usage or bad input, 75 stopped on request (SIGTERM or Ctrl-C) and resumable.
"""

from __future__ import annotations

from collections.abc import Sequence

import typer

from gaudi_bert import __version__
from gaudi_bert.cli import (
    cluster_commands,
    data_commands,
    exchange_commands,
    model_commands,
    pipeline_commands,
    prediction_commands,
    task_commands,
)
from gaudi_bert.cli.endings import run_to_the_end

__all__ = ["main"]

app = typer.Typer(
    name="gaudi-bert",
    help="Pack BERT pretraining data, prove the packing, and train on it, on Gaudi or on a CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_commands.register(app)
exchange_commands.register(app)
model_commands.register(app)
prediction_commands.register(app)
task_commands.register(app)
pipeline_commands.register(app)
cluster_commands.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gaudi-bert {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Options of the command as a whole."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    run_to_the_end(lambda: app(args=list(arguments) if arguments is not None else None))
