"""Arguments that several commands share: patterns that a shell replaced, and options that settings are named by."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from gaudi_bert.cli import arguments
from gaudi_bert.cli.main import app
from gaudi_bert.common.errors import InputError
from gaudi_bert.config import values
from gaudi_bert.packing import pack_lengths
from gaudi_bert.packing.algorithms import ALGORITHMS
from tests.builders.command_line import refusal, succeed
from tests.builders.folders import contents
from tests.builders.packing_case import make_case


def test_the_algorithms_have_the_same_names_everywhere() -> None:
    places = {
        "Algorithm in gaudi_bert/config/values.py": get_args(values.Algorithm),
        "Algorithm in gaudi_bert/packing/pack_lengths.py": get_args(pack_lengths.Algorithm),
    }
    for place, names in places.items():
        new = set(ALGORITHMS).symmetric_difference(names)
        assert names == tuple(ALGORITHMS), f"{place}: add {new or 'them'} in the order of gaudi_bert/packing/algorithms.py"


def test_files_that_the_shell_made_of_a_pattern_are_that_pattern(tmp_path: Path) -> None:
    case = make_case(tmp_path, files=3, sequences_per_file=7)
    files = sorted(path.relative_to(tmp_path) for path in case.records.iterdir())
    for name, records in (("quoted", [f"{files[0].parent}/*"]), ("unquoted", files)):
        succeed("pack", *records, "--out", name, "--workers", 1, folder=tmp_path)
        succeed("verify", *records, name, folder=tmp_path)
    assert contents(tmp_path / "unquoted") == contents(tmp_path / "quoted")


@pytest.mark.parametrize("names", [["a.x", "c.x"], ["a.json", "b.json"], ["a", "b"]])
def test_what_no_pattern_stands_for_is_explained(names: list[str], tmp_path: Path) -> None:
    for file in ("a.x", "b.x", "c.x", "a.json", "b.json"):
        (tmp_path / file).touch()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    line = refusal("pack", *names, "--out", "o", folder=tmp_path)
    assert line.startswith(f"{names[1]}: ")
    assert f" '*{Path(names[1]).suffix}'" in line


def test_options_are_the_keys_of_a_section_with_its_choices_and_defaults() -> None:
    group: Any = typer.main.get_command(app)
    command = group.get_command(None, "tokenize")
    made = {parameter.name: parameter for parameter in command.params}
    assert made["too_long"].metavar == "[split|truncate|drop|error]"
    assert made["text_column"].help.endswith("[default: text]")
    assert [flag for name in ("no_header", "special_tokens") for flag in (*made[name].opts, *made[name].secondary_opts)] == [
        *("--no-header", "--special-tokens", "--no-special-tokens")
    ]
    typed: dict[str, Any] = {}

    keys = {name: f"files.{name}" for name in ("columns", "no_header")}

    @arguments.add_settings_options("gaudi_bert.config.sections:TokenizeSettings", "too_long", **keys)
    def show(options: arguments.Options) -> None:
        typed.update(options)

    show.complete()(columns="a, b", no_header=True, too_long=None)  # type: ignore[attr-defined]
    assert typed == {"files.columns": ("--columns a, b", ("a", "b")), "files.no_header": ("--no-header True", True)}
    with pytest.raises(InputError, match="--columns: must not be empty"):
        show.complete()(columns="", no_header=None, too_long=None)  # type: ignore[attr-defined]
