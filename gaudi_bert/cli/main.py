"""The `gaudi-bert` command: all subcommands in one place, and the one place where an error becomes a line and an exit code.

Exit codes: 0 all done, 1 failed, 2 usage or bad input, 75 stopped on request and resumable, 130 interrupted (Ctrl-C).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from gaudi_bert import __version__
from gaudi_bert.cli import cluster_commands, data_commands, exchange_commands, model_commands, pipeline_commands
from gaudi_bert.common.errors import GaudiBertError, InputError

__all__ = ["main"]

INTERRUPTED = 130
# The extra of this package that brings a module.
EXTRAS = {
    "docker": "docker",
    "kubernetes": "kubernetes",
    "pyarrow": "parquet",
    "safetensors": "tensorflow",
    "tensorflow": "tensorflow",
}

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
    try:
        app(args=list(arguments) if arguments is not None else None)
    except GaudiBertError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        print(f"error: {_missing(module)}", file=sys.stderr)  # noqa: T201
        sys.exit(InputError.exit_code)
    except KeyboardInterrupt:
        print("error: interrupted; the same command goes on from what is finished", file=sys.stderr)  # noqa: T201
        sys.exit(INTERRUPTED)


def _missing(module: str) -> str:
    """What to do where a module that an extra brings is not installed."""
    if module == "tensorflow" and sys.version_info >= (3, 12):
        found = ".".join(map(str, sys.version_info[:2]))
        return f"this command needs TensorFlow 2.15, which has Python 3.10 and 3.11 only, and this is Python {found}"
    return f"this command needs {module}, which is not installed; run: pip install 'gaudi-bert[{EXTRAS[module]}]'"
