"""The output of commands: their help and their results.

The help lists commands by purpose, and is coloured on a terminal. A result is printed as lines of text, or as one JSON
object with `--json`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from gaudi_bert.artefacts.results import to_json
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.launch import is_first_process
from gaudi_bert.common.progress import ONLY_RESULT_VARIABLE

# The example at the end of each command's help. Tests parse every example.
EXAMPLES = {
    "estimate": "gaudi-bert estimate wikipedia-512",
    "prepare": "gaudi-bert prepare text/ --train-vocab 30000 --out examples/",
    "tokenize": "gaudi-bert tokenize texts.jsonl --tokenizer model/ --max-sequence-length 512 --out tokens/",
    "histogram": "gaudi-bert histogram my-tfrecords/ --out histogram.json",
    "plan": "gaudi-bert plan histogram.json --out plan.json --algorithm optimal",
    "write": "gaudi-bert write my-tfrecords/ --plan plan.json --out packed/",
    "pack": "gaudi-bert pack my-tfrecords/ --out packed/ --verify",
    "verify": "gaudi-bert verify my-tfrecords/ packed/",
    "convert": "gaudi-bert convert packed/ --to hdf5 --out packed-hdf5/",
    "inspect": "gaudi-bert inspect packed/ --record 7 --vocab vocab.txt",
    "train": "gaudi-bert train --data packed/ --out run/ --model bert-base --set training.learning_rate=1e-4",
    "evaluate": "gaudi-bert evaluate --data packed-held-out/ --checkpoint run/",
    "verify-model": "gaudi-bert verify-model --checkpoint run/",
    "export": "gaudi-bert export --checkpoint run/ --out model/",
    "finetune": (
        "gaudi-bert finetune --task classification --data train.jsonl --evaluation dev.jsonl --model model/ --out tuned/"
    ),
    "predict": "gaudi-bert predict --model tuned/ --data new.jsonl --out answers.jsonl",
    "embed": "gaudi-bert embed --model model/ --data texts.jsonl --out vectors.npy",
    "serve": "gaudi-bert serve --model model/",
    "run": "gaudi-bert run demo --stages prepare,histogram,plan,write,verify",
    "init": "gaudi-bert init wiki",
    "report": "gaudi-bert report work/demo",
    "settings": "gaudi-bert settings training",
    "doctor": "gaudi-bert doctor --pipeline wiki.yaml",
}

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
_BOLD, _CYAN, _RED, _PLAIN = "\033[1m", "\033[36m", "\033[31m", "\033[0m"


def _supports_colours(stream: Any) -> bool:
    """Return whether output to a stream should be coloured. The stream must be a terminal, and NO_COLOR
    (https://no-color.org) must not be set.
    """
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def error_prefix() -> str:
    """Return the beginning of an error line, which is coloured on a terminal."""
    return f"{_RED}error:{_PLAIN} " if _supports_colours(sys.stderr) else "error: "


def silence_output(requested: bool = True) -> None:
    """Suppress all output except results and errors, in this process and in the processes that it starts.

    Args:
        requested: The value of `--quiet`. If it is False, nothing changes.
    """
    if requested:
        os.environ.update(dict.fromkeys((ONLY_RESULT_VARIABLE, "GAUDI_BERT_QUIET"), "1"))


class Command(TyperCommand):
    """A command with an example at the end of its help. It accepts `-o` and `-q`, and shells can complete the choices of its
    options.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for parameter in self.params:
            choices = re.fullmatch(r"\[(.*)\]", parameter.metavar or "")
            if parameter.param_type_name == "argument":
                parameter.metavar = str(parameter.name).upper()
            elif parameter.name == "out":
                parameter.opts.append("-o")
            elif choices is not None:  # typer has no public function that sets the completion of an existing option
                parameter._custom_shell_complete = partial(_complete_choice, choices[1].split("|"))  # noqa: SLF001
        if self.name in EXAMPLES:
            self.epilog = f"Example:  {EXAMPLES[self.name]}"

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the end of the help, which describes `--quiet` and shows an example. The example is a single line, so that
        users can copy it.
        """
        formatter.write("\n  -q, --quiet: print only results and errors.\n")
        if self.epilog:
            formatter.write(f"\n{self.epilog}\n")

    def get_help(self, ctx: Any) -> str:
        """Return the help of the command as formatted text."""
        plain = re.sub(r"\{([A-Z_]+)\}", r"\1", super().get_help(ctx))
        plain = re.sub(
            r"^(  [A-Z][A-Z_]+(?:\.\.\.)? )(<[^>]+>)", lambda match: match[1] + " " * len(match[2]), plain, flags=re.M
        )
        return _add_colours(plain)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. `-q` is accepted anywhere before `--`."""
        options = list(takewhile(lambda word: word != "--", args))
        loud = [word for word in options if word not in ("-q", "--quiet")]
        silence_output(len(loud) < len(options))
        rest: list[str] = super().parse_args(ctx, loud + args[len(options) :])
        return rest


def _complete_choice(choices: Sequence[str], ctx: Any, parameter: Any, incomplete: str) -> list[str]:
    """Return the choices that begin with the text typed so far. Shells use them to complete the value of an option."""
    return [choice for choice in choices if choice.startswith(incomplete)]


class Commands(TyperGroup):
    """A group of commands. The help lists the commands by purpose, with their complete summaries."""

    def get_help(self, ctx: Any) -> str:
        """Return the help of the group as formatted text."""
        return _add_colours(super().get_help(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command with all of its options, including those that `add_settings_options` defines."""
        command = super().get_command(ctx, cmd_name)
        complete = getattr(getattr(command, "callback", None), "complete", None)
        if complete is None:
            return command
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(cmd_name, cls=Command)(complete())
        return typer.main.get_command(alone)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. `help COMMAND` is the same as `COMMAND --help`. Without arguments, print the help."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        elif not args and sys.stdout.isatty():
            args = ["--help"]
        elif not args and not ctx.resilient_parsing:  # the output is not a terminal, so a script probably lost its arguments
            typer.echo(self.get_help(ctx), err=True)
            ctx.exit(InputError.exit_code)
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the name and the summary of each command, grouped by purpose."""
        names = self.list_commands(ctx)
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in names:
            command: Any = self.commands[name]
            if not command.hidden:
                rows = panels.setdefault(command.rich_help_panel or "Commands", [])
                rows.append((name.ljust(max(map(len, names))), command.get_short_help_str(limit=1000)))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def _add_colours(text: str) -> str:
    """Return a help text with bold headings and coloured commands and options. If the output should not be coloured, return
    the text unchanged.
    """
    if not _supports_colours(sys.stdout):
        return text
    text = re.sub(r"^(\w.*:)$", rf"{_BOLD}\1{_PLAIN}", text, flags=re.MULTILINE)
    return re.sub(
        r"^(  (?:-[\w-]+(?:, -[\w-]+)*|[a-z][\w-]*)(?=  | <| [A-Z]|$))", rf"{_CYAN}\1{_PLAIN}", text, flags=re.MULTILINE
    )


# --- results


def print_result(
    result: Any,
    as_json: bool,
    lines: Sequence[str] | None = None,
    next_command: str | None = None,
    *,
    shared: bool = False,
) -> None:
    """Print the result of a stage or a runner, either as lines of text or as JSON.

    Args:
        result: The result, which `to_json` must be able to convert.
        as_json: Whether to print one JSON object instead of lines of text.
        lines: The lines of text. By default, `result.format_lines` returns them.
        next_command: The command that most users type next, without `gaudi-bert`. It is not printed with `--json` or
            `--quiet`.
        shared: Whether all processes of a launcher have the same result, so that only the first process prints it.
    """
    if shared and not is_first_process():
        return
    if as_json:
        typer.echo(json.dumps(to_json(result), allow_nan=False, default=str))
        return
    for line in result.format_lines() if lines is None else lines:
        typer.echo(line)
    if next_command is not None and not os.environ.get(ONLY_RESULT_VARIABLE):
        typer.echo(f"Next: gaudi-bert {next_command}")


def join_shell_words(words: Iterable[object]) -> str:
    """Join the words of a command into one line, and quote words with special characters for the shell."""
    return shlex.join(map(str, words))
