"""How commands explain themselves: grouped by purpose, in colour on a terminal, with the defaults that the settings have."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import RESULT_ALONE

if TYPE_CHECKING:
    from gaudi_bert.config.values import Settings

# An example of each command, for the foot of its help. Tests parse each one.
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

# What an option may be, for help and for completion, by command and option; `*` is every command.
CHOICES: dict[tuple[str, str], tuple[str, ...]] = {
    ("*", "engine"): ("tensorflow", "pytorch"),
    ("*", "algorithm"): ("nnls", "optimal", "nnlshp", "ennlshp", "spfhp", "lpfhp", "greedy", "ffd", "none"),
    ("*", "precision"): ("float32", "bfloat16"),
    ("*", "on_bad_row"): ("stop", "skip"),
    ("*", "on_bad_file"): ("stop", "skip"),
    ("predict", "group_by"): ("query",),
    ("tokenize", "too_long"): ("split", "truncate", "drop", "error"),
    ("pack", "too_long"): ("error", "truncate", "split", "drop"),
    ("*", "too_long"): ("truncate", "window", "error"),
    ("run", "on"): ("local", "docker", "kubernetes"),
    ("plan", "leftovers"): ("best-fit", "complement"),
    ("convert", "to"): ("hdf5",),
    ("embed", "pooling"): ("cls", "mean", "max"),
}

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
_BOLD, _CYAN, _RED, _PLAIN = "\033[1m", "\033[36m", "\033[31m", "\033[0m"


def _has_colours(stream: Any) -> bool:
    """Whether a stream is a terminal that wants colours (https://no-color.org)."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


# Wrong words on the command line, in the parser that typer brings with it or uses.
UsageError: Any = typer.BadParameter.__bases__[0]


def explained(error: Any) -> InputError:
    """A usage error as one line that leads to the command's help."""
    from pydantic import ValidationError

    from gaudi_bert.config.values import plain_message

    if isinstance(error.__cause__, ValidationError):
        error.message = plain_message(error.__cause__.errors()[0])
    command = error.ctx.command_path if error.ctx is not None else "gaudi-bert"
    message = error.format_message().rstrip(".")
    return InputError(f"{message}{'' if message.endswith('?') else ';'} see: {command} --help")


def error_prefix() -> str:
    """Return what an error line begins with."""
    return f"{_RED}error:{_PLAIN} " if _has_colours(sys.stderr) else "error: "


def be_quiet(requested: bool = True) -> None:
    """Silence everything but results and errors, in this process and those that it starts."""
    if requested:
        os.environ.update(dict.fromkeys((RESULT_ALONE, "GAUDI_BERT_QUIET"), "1"))


class Command(TyperCommand):
    """A command whose help tells the defaults of settings and ends with an example; `-o` is `--out`, `-q` is `--quiet`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for parameter in self.params:
            choices = CHOICES.get((str(self.name), str(parameter.name))) or CHOICES.get(("*", str(parameter.name)), ())
            if parameter.param_type_name == "argument":
                parameter.metavar = str(parameter.name).upper()
            if parameter.name == "out":
                parameter.opts.append("-o")
            if choices:
                parameter.metavar = f"[{'|'.join(choices)}]"
                parameter._custom_shell_complete = _completion(choices)  # noqa: SLF001 - set by no public way afterwards
        if self.name in EXAMPLES:
            self.epilog = f"Example:  {EXAMPLES[self.name]}"

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the option of all commands, and the example on one line, to be copied."""
        formatter.write("\n  -q, --quiet, with any command, prints the result alone.\n")
        if self.epilog:
            formatter.write(f"\n{self.epilog}\n")

    def get_help(self, ctx: Any) -> str:
        """The help as text."""
        _show_defaults(str(self.name), self.params)
        plain = re.sub(r"default:(\s+)\(([^()]*)\)", r"default:\1\2", super().get_help(ctx))
        plain = re.sub(r"\{([A-Z_]+)\}", r"\1", plain)
        plain = re.sub(
            r"^(  [A-Z][A-Z_]+(?:\.\.\.)? )(<[^>]+>)", lambda match: match[1] + " " * len(match[2]), plain, flags=re.M
        )
        return _coloured(plain)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; `-q` may be anywhere among the options."""
        options = list(takewhile(lambda word: word != "--", args))
        loud = [word for word in options if word not in ("-q", "--quiet")]
        be_quiet(len(loud) < len(options))
        rest: list[str] = super().parse_args(ctx, loud + args[len(options) :])
        return rest


def _completion(choices: Sequence[str]) -> Any:
    def complete(ctx: Any, parameter: Any, incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


class Commands(TyperGroup):
    """Commands below the titles of their panels, none of whose summaries is cut off."""

    def get_help(self, ctx: Any) -> str:
        """The help as text."""
        return _coloured(super().get_help(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments: `help COMMAND` is `COMMAND --help`, and nothing at all prints the help."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        elif not args and sys.stdout.isatty():
            args = ["--help"]
        elif not args and not ctx.resilient_parsing:  # a script that lost its words; a shell that completes has none
            typer.echo(self.get_help(ctx), err=True)
            ctx.exit(InputError.exit_code)
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the summaries of all commands."""
        names = self.list_commands(ctx)
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in names:
            command: Any = self.get_command(ctx, name)
            if not command.hidden:
                rows = panels.setdefault(command.rich_help_panel or "Commands", [])
                rows.append((name.ljust(max(map(len, names))), command.get_short_help_str(limit=1000)))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def _coloured(text: str) -> str:
    """Headings in bold, and what is to be typed in colour, where the help goes to a terminal."""
    if not _has_colours(sys.stdout):
        return text
    text = re.sub(r"^(\w.*:)$", rf"{_BOLD}\1{_PLAIN}", text, flags=re.MULTILINE)
    return re.sub(
        r"^(  (?:-[\w-]+(?:, -[\w-]+)*|[a-z][\w-]*)(?=  | <| [A-Z]|$))", rf"{_CYAN}\1{_PLAIN}", text, flags=re.MULTILINE
    )


def _show_defaults(command: str, parameters: Sequence[Any]) -> None:
    """Take from the settings what an option that is not given is."""
    for parameter in parameters:
        shown = {
            kind: _default(section, parameter.name)
            for kind, section in _sections(command)
            if parameter.name in section.model_fields
        }
        texts = list(dict.fromkeys(text for text in shown.values() if text))
        if parameter.default is None and not parameter.required and texts:
            parameter.show_default = (
                texts[0] if len(texts) == 1 else "; ".join(f"{kind}{text}" for kind, text in shown.items())
            )


def _sections(command: str) -> list[tuple[str, type[Settings]]]:
    """The settings that a command's options are keys of; `pack` has those of TFRecords, and those of tables."""
    from gaudi_bert.config.sections import FineTuneSettings, PackingSettings, PrepareSettings, TableSettings

    sections: dict[str, list[tuple[str, type[Settings]]]] = {
        "prepare": [("", PrepareSettings)],
        "plan": [("", PackingSettings)],
        "pack": [("", PackingSettings), ("tables: ", TableSettings)],
        "finetune": [("", FineTuneSettings)],
    }
    return sections.get(command, [])


def _default(section: type[Settings], name: str) -> str:
    field = section.model_fields[name]
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if default is None or default is False:
        return ""
    return f"{default / 2**30:g}GiB" if name.endswith("_bytes") else str(default)
