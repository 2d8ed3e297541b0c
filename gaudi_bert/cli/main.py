"""The `gaudi-bert` command: its subcommands and its exit codes.

The exit code is 0 if everything was done, 1 after a failure, 2 if the usage or the input is wrong, and 75 if the user
stopped the command (SIGTERM or Ctrl-C) and the same command can resume. Every error is one line of limited length.
"""

from __future__ import annotations

import errno
import gc
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import Any, NoReturn

import typer

from gaudi_bert import __version__
from gaudi_bert.cli import data_commands, model_commands, output, pipeline_commands
from gaudi_bert.common.errors import (
    EXTRAS,
    FailedError,
    GaudiBertError,
    InputError,
    StoppedError,
    install_command,
    library_title,
    shorten,
    supports_tensorflow,
)
from gaudi_bert.common.files import WRONG_PATH_ERRORS
from gaudi_bert.common.launch import handle_signals

# All commands, grouped by purpose. `--help` lists the groups and commands in this order.
GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Before anything is written": {"estimate": data_commands.estimate},
    "From text or tables to packs": {
        "prepare": data_commands.prepare,
        "tokenize": data_commands.tokenize,
        "histogram": data_commands.histogram,
        "plan": data_commands.plan,
        "write": data_commands.write,
        "pack": data_commands.pack,
        "verify": data_commands.verify,
        "convert": data_commands.convert,
        "inspect": data_commands.inspect,
    },
    "Pretraining": {
        "train": model_commands.train,
        "evaluate": model_commands.evaluate,
        "verify-model": model_commands.verify_model,
        "export": model_commands.export,
    },
    "Tasks": {
        "finetune": model_commands.finetune,
        "predict": model_commands.predict,
        "embed": model_commands.embed,
        "serve": model_commands.serve,
    },
    "Pipelines and machines": {
        "init": pipeline_commands.init,
        "run": pipeline_commands.run,
        "report": pipeline_commands.report,
        "settings": pipeline_commands.settings,
        "wait": pipeline_commands.wait,
        "doctor": pipeline_commands.doctor,
    },
}


class _Commands(output.Commands):
    def invoke(self, ctx: Any) -> Any:
        """Run the command. If it is interrupted, raise a StoppedError, because typer would use its own exit code."""

        def find_message() -> str:
            """Return the message that is printed if a signal stops the command. It says whether the command can be resumed.

            Call this function only when the command is stopped, because typer sets the name of the subcommand late.
            """
            return "stopped" if ctx.invoked_subcommand in _COMMANDS_WITHOUT_RESUME else _STOPPED

        try:
            with handle_signals((signal.SIGALRM,), lambda *_: _exit_with_running_threads(find_message())):
                return super().invoke(ctx)
        except (KeyboardInterrupt, RuntimeError) as error:
            # If a signal arrives while Python acquires a lock, Python may raise a RuntimeError instead of a
            # KeyboardInterrupt. The KeyboardInterrupt is then the context of the RuntimeError, so search the complete chain
            # of exceptions.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, KeyboardInterrupt):
                cause = cause.__context__
            if cause is None:
                raise
            raise StoppedError(find_message()) from error


app = typer.Typer(
    cls=_Commands,
    name="gaudi-bert",
    help="Pack short sequences into full rows, prove that nothing was lost, and train BERT-like models on these rows, on "
    "Gaudi cards, a GPU or a CPU.",
    epilog="`gaudi-bert COMMAND -h` (or `gaudi-bert help COMMAND`) explains a command.",
    context_settings=output.CONTEXT,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _title, _group in GROUPS.items():
    for _name, _command in _group.items():
        # Users never need the command `wait`, because only our Kubernetes Jobs call it. Therefore do not show it on the
        # first page of the help.
        app.command(_name, cls=output.Command, hidden=_name == "wait", rich_help_panel=_title)(_command)
app.add_typer(pipeline_commands.k8s, rich_help_panel="Pipelines and machines")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"gaudi-bert {__version__}")
        raise typer.Exit


@app.callback()
def _define_global_options(
    version: bool = typer.Option(
        False, "--version", "-V", callback=_print_version, is_eager=True, help="Print the version."
    ),
    quiet: bool = typer.Option(
        False, "--quiet", "-q", callback=output.silence_output, help="Print only results and errors."
    ),
) -> None:
    """Define the options that users type before a subcommand. typer calls this function before it runs the subcommand."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line, and exit the process with the exit code of the command.

    Args:
        arguments: The words after `gaudi-bert`. By default, they are the arguments of this process.
    """
    # Large libraries create millions of objects that are never freed. Scanning them again and again takes a fifth of the
    # loading time, so run the garbage collector less often.
    gc.set_threshold(100_000, 20, 20)
    try:
        _run_and_exit(lambda: app(args=list(arguments) if arguments is not None else None, standalone_mode=False))
    except KeyboardInterrupt:  # a second signal arrived while the command was stopping because of the first
        _exit_with_error(StoppedError(_STOPPED))


# --- the end of a command: exit code 0, or one error line of bounded length with the exit code of the error

_MAX_LINE_CHARACTERS = 480
_SECONDS_TO_UNWIND = 1.0
_SECONDS_TO_STOP = 20.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOPPED = "stopped; run the same command again to resume"
# These commands do not store unfinished work. If one of them is stopped, the message therefore does not offer to resume it.
_COMMANDS_WITHOUT_RESUME = ("doctor", "estimate", "inspect", "k8s", "settings")
# The class of errors that typer raises for wrong usage. Some versions of typer have no public name for it.
_UsageError: Any = typer.BadParameter.__bases__[0]
# Both engines need these libraries. If one of them is missing, the error message recommends the `tensorflow` extra if
# TensorFlow is installed, and otherwise the `pytorch` extra.
_LIBRARIES_OF_BOTH_ENGINES = ("safetensors", "seqeval", "sklearn")


def _run_and_exit(command: Callable[[], int | None]) -> NoReturn:
    """Run a command, print the error if it raises one, and exit the process with the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # file names may contain bytes that cannot be printed
    try:
        with _interrupt_on_signals():
            code = command() or 0
    except GaudiBertError as error:
        _exit_with_error(error)
    except _UsageError as error:
        _exit_with_error(_usage_error(error))
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        _exit_with_error(_missing_library_error(module))
    except OSError as error:
        # Stages do not catch every operating system error. For example, a failing disk may cause an error that is first
        # caught here. Report such errors in one line.
        if error.filename is None and error.errno == errno.ENOSPC:
            _exit_with_error(_stdout_write_error(error))
        kind = InputError if error.errno in WRONG_PATH_ERRORS else FailedError
        _exit_with_error(
            kind(f"{error.filename or 'this machine'}: {error.strerror or error}; check the path and the machine")
        )
    try:
        sys.stdout.flush()
    except OSError as error:
        _exit_with_error(_stdout_write_error(error))
    sys.exit(code)


@contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """Raise a KeyboardInterrupt in the `with` block if the process receives SIGTERM or the user presses Ctrl-C.

    Kubernetes and Slurm send SIGTERM. Stages that can only stop at certain moments install their own handlers. A signal that
    this process inherited as ignored, as in background jobs of a shell, stays ignored. A second signal within a second is
    ignored, because it could interrupt the release of a lock.

    Even the first signal may arrive just after Python has acquired a lock, for example inside `Condition.__enter__`, and
    then nothing releases the lock. A thread that needs the lock never ends, and neither does the process, because it waits
    for all of its threads. Therefore a timer ends the process if it is still running after `_SECONDS_TO_STOP` seconds.
    """
    last = -math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        previous, last = last, time.monotonic()
        if last - previous > _SECONDS_TO_UNWIND:
            signal.setitimer(signal.ITIMER_REAL, _SECONDS_TO_STOP)
            raise KeyboardInterrupt

    numbers = [number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    with handle_signals(numbers, interrupt):
        yield
    signal.setitimer(signal.ITIMER_REAL, 0)  # the block has handled the interrupt itself


def _exit_with_running_threads(message: str) -> NoReturn:
    """Print the message of a stopped command, and exit the process without waiting for its threads.

    Files are complete or absent at any moment, so nothing is damaged.
    """
    os.write(2, f"{message}\n".encode())
    os._exit(StoppedError.exit_code)


def _usage_error(error: Any) -> InputError:
    """Return the error for wrong usage of a command. The message ends with the command that prints the help."""
    from pydantic import ValidationError

    from gaudi_bert.config.values import format_problem

    if isinstance(error.__cause__, ValidationError):
        error.message = format_problem(error.__cause__.errors()[0])
    command = error.ctx.command_path if error.ctx is not None else "gaudi-bert"
    message = error.format_message().rstrip(".")
    return InputError(f"{message}{'' if message.endswith('?') else ';'} see: {command} --help")


def _stdout_write_error(error: OSError) -> InputError:
    """Return the error to report if standard output cannot be written, and set `sys.stdout` to None.

    If `sys.stdout` kept its value, Python would try to write to standard output again at exit.
    """
    sys.stdout = None
    return InputError(
        f"standard output: the output cannot be written ({error.strerror}); redirect it to a disk with free space"
    )


def _missing_library_error(module: str) -> InputError:
    """Return the error for a library that is not installed. The message contains the command that installs the library."""
    reason = "which is not installed"
    if module == "tensorflow" and not supports_tensorflow():
        reason = f"version 2.15, which does not exist for Python {'.'.join(map(str, sys.version_info[:2]))}"
    extra = EXTRAS[module]
    if module in _LIBRARIES_OF_BOTH_ENGINES and find_spec("tensorflow") is not None:
        extra = "tensorflow"
    elif extra == "pytorch" and find_spec("torch") is None:
        module = "torch"  # the missing library comes with torch
    return InputError(f"this command requires {library_title(module)}, {reason}; run: {install_command(extra)}")


def _exit_with_error(error: GaudiBertError) -> NoReturn:
    """Print an error as one line, and exit the process with the error's exit code."""
    kind = output.error_prefix()
    if isinstance(error, StoppedError):
        kind = ""  # stopping a command is not an error
        for number in _STOP_SIGNALS:  # a second signal would change the exit code
            signal.signal(number, signal.SIG_IGN)
        # While the interrupted command exits, libraries may raise errors when their objects are deleted. These errors no
        # longer matter, so do not print them.
        sys.unraisablehook = lambda unraisable: None
        signal.signal(signal.SIGALRM, lambda *_: os._exit(error.exit_code))  # the message is printed here
    print(f"{kind}{shorten(str(error), _MAX_LINE_CHARACTERS)}", file=sys.stderr)  # noqa: T201
    sys.exit(error.exit_code)
