"""The commands about pipelines, clusters and machines as they are typed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gaudi_bert.cli.arguments import load_pipeline_settings
from gaudi_bert.config.options import PIPELINES_FOLDER, find_pipeline_file
from tests.builders.command_line import refusal, run_command, succeed

DEMO = str(PIPELINES_FOLDER / "demo.yaml")


@pytest.fixture(autouse=True)
def _no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, on a machine without any cluster."""
    for name in [name for name in os.environ if name.startswith("KUBE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    monkeypatch.chdir(tmp_path)


def test_init_writes_a_file_that_runs_and_replaces_none() -> None:
    assert succeed("init", "wiki").stdout.splitlines() == [
        "Wrote wiki.yaml; its first lines explain what to change",
        "Next: gaudi-bert run wiki.yaml --dry-run",
    ]
    assert load_pipeline_settings(Path("wiki.yaml"), None).name == "wiki"
    assert "to do here: prepare, histogram, plan, write, verify, train" in succeed("run", "wiki.yaml", "--dry-run").stdout
    assert refusal("init", "wiki").startswith("wiki.yaml: the file already exists; ")
    assert refusal("init", "My Wiki").startswith("My Wiki: must be at most 42 ")
    assert [path.name for path in Path().iterdir()] == ["wiki.yaml"]
    succeed("init", "retrieval")
    assert load_pipeline_settings(Path("retrieval.yaml"), None).task.name == "embedding"


def test_a_bare_name_is_a_pipeline_of_the_package_unless_there_is_a_file_of_that_name(tmp_path: Path) -> None:
    assert find_pipeline_file(Path("demo")) == PIPELINES_FOLDER / "demo.yaml"
    assert json.loads(succeed("run", "demo", "--dry-run", "--json").stdout)["settings"]["name"] == "demo"
    assert json.loads(succeed("doctor", "--pipeline", "demo", "--json").stdout)["findings"]
    assert find_pipeline_file(Path("nix")) == Path("nix")
    assert "nix: cannot read" in refusal("run", "nix", "--dry-run")
    assert find_pipeline_file(tmp_path / "demo") == tmp_path / "demo"
    Path("demo").write_text("name: mine\n")
    assert json.loads(succeed("run", "demo", "--dry-run", "--json").stdout)["settings"]["name"] == "mine"


def test_settings_of_one_section_and_the_schema() -> None:
    lines = succeed("settings", "mlperf").stdout.splitlines()
    assert lines[0] == "## mlperf"
    assert all("`mlperf." in line for line in lines if line.startswith("| `"))
    assert refusal("settings", "nix").startswith("nix: ")
    rate = succeed("settings", "training.learning_rate").stdout.splitlines()
    assert [line.split("|")[1].strip() for line in rate[2:]] == ["`training.learning_rate`"]
    assert "did you mean `training.seed`?" in refusal("settings", "training.seeed")
    assert json.loads(succeed("settings", "--json").stdout)["properties"]["packing"]
    assert "SECTION" in refusal("settings", "packing", "--json")


def test_quiet_is_taken_before_and_after_the_command(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("one two\n\nthree four five\n")
    for number, command in enumerate((("-q", "init"), ("init", "-q"), ("init", "--quiet"))):
        done = run_command(*command, f"name-{number}")
        assert (done.stdout, done.stderr) == (f"Wrote name-{number}.yaml; its first lines explain what to change\n", "")


# --- clusters and machines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", DEMO, "--on", "mars"], "local, docker, kubernetes"),
        (["run", DEMO, "--on", "kubernetes"], "does not run in a cluster: "),
        (["run", DEMO, "--on", "kubernetes", "--overwrite"], "gaudi-bert k8s delete PIPELINE --data"),
        *(
            (["run", DEMO, "--on", "kubernetes", *option], "resources.data_workers and resources.data_processes instead")
            for option in (["--shard", "0/2"], ["--finish"], ["--workers", "2"])
        ),
        (["run", DEMO, "--shard", "0/2", "--stages", "train"], "--shard: must be used with exactly one stage"),
        (["run", DEMO, "--finish", "--stages", "plan"], "--finish: must be used with exactly one stage"),
        (["run", DEMO, "--finish", "--overwrite", "--stages", "verify"], "--finish cannot be combined with --overwrite"),
        (["run", DEMO, "--finish", "--shard", "0/2", "--stages", "write"], "cannot be combined with"),
        (["wait", DEMO, "--for", "packing"], "--for packing: unknown stage"),
        (["k8s", "status", DEMO], "does not run in a cluster: "),
        (["doctor", "--cluster"], "does not run in a cluster: "),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    assert said in refusal(*arguments)
    assert not list(tmp_path.iterdir())


def test_a_command_that_keeps_nothing_promises_nothing_when_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    from gaudi_bert.runners import doctor

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine_cluster", interrupt)
    done = run_command("doctor", "--cluster")
    assert (done.returncode, done.stderr) == (75, "stopped\n")


@pytest.mark.parametrize("how", ["edited by hand", "rendered from other settings"])
def test_render_replaces_manifests_only_with_overwrite(how: str, tmp_path: Path) -> None:
    command = ["run", DEMO, "--render", "out", "--stages", "plan"]
    succeed(*command)
    rendered, manifest = (tmp_path / "out/data/plan.yaml").read_text(), tmp_path / "out/data/plan.yaml"
    if how == "edited by hand":
        manifest.write_text(rendered.replace("cpu:", "cpu: # mine\n", 1))
    else:
        command += ["--set", "images.data=mine"]
    before = manifest.read_text()
    assert ".yaml: the file differs from the manifest that --render would write" in refusal(*command)
    assert manifest.read_text() == before
    succeed(*command, "--overwrite")
    assert ("image: mine" in manifest.read_text()) if how != "edited by hand" else manifest.read_text() == rendered
