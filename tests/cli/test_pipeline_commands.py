"""`init`, `settings`, and the pipelines that come with the package, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gaudi_bert.cli.arguments import pipeline_settings
from gaudi_bert.config.shipped import SHIPPED, pipeline_path
from tests.builders.command_line import refusal, run_command, succeed


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_init_writes_a_file_that_runs_and_replaces_none() -> None:
    assert succeed("init", "wiki").stdout.splitlines() == [
        "Wrote wiki.yaml; its first lines say what to change",
        "Next: gaudi-bert run wiki.yaml --dry-run",
    ]
    assert pipeline_settings(Path("wiki.yaml"), None).name == "wiki"
    assert "to do here: prepare, histogram, plan, write, verify, train" in succeed("run", "wiki.yaml", "--dry-run").stdout
    assert refusal("init", "wiki") == "wiki.yaml: exists already; give another name, or remove it"
    assert refusal("init", "My Wiki").startswith("My Wiki: must be at most 42 of a to z, 0 to 9 and -")
    assert [path.name for path in Path().iterdir()] == ["wiki.yaml"]


def test_a_bare_name_is_a_pipeline_of_the_package_unless_there_is_a_file_of_that_name(tmp_path: Path) -> None:
    assert pipeline_path(Path("demo")) == SHIPPED / "demo.yaml"
    assert json.loads(succeed("run", "demo", "--dry-run", "--json").stdout)["settings"]["name"] == "demo"
    assert pipeline_path(Path("nix")) == Path("nix")
    assert "nix: cannot read the pipeline file" in refusal("run", "nix", "--dry-run")
    assert pipeline_path(tmp_path / "demo") == tmp_path / "demo"
    Path("demo").write_text("name: mine\n")
    assert json.loads(succeed("run", "demo", "--dry-run", "--json").stdout)["settings"]["name"] == "mine"


def test_settings_of_one_section_and_the_schema() -> None:
    lines = succeed("settings", "mlperf").stdout.splitlines()
    assert lines[0] == "## mlperf"
    assert all("`mlperf." in line for line in lines if line.startswith("| `"))
    assert refusal("settings", "nix").startswith("nix: not a section of a pipeline file; choose one of prepare, packing, ")
    assert json.loads(succeed("settings", "--json").stdout)["properties"]["packing"]
    assert "leave the section out" in refusal("settings", "packing", "--json")


def test_quiet_is_taken_before_and_after_the_command(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("one two\n\nthree four five\n")
    for number, command in enumerate((("-q", "init"), ("init", "-q"), ("init", "--quiet"))):
        done = run_command(*command, f"name-{number}")
        assert (done.stdout, done.stderr) == (f"Wrote name-{number}.yaml; its first lines say what to change\n", "")
