"""The commands about clusters as a user meets them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.builders.command_line import refusal, run_command, succeed

DEMO = str(Path(__file__).resolve().parent.parent.parent / "pipelines" / "demo.yaml")


@pytest.fixture(autouse=True)
def _no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any cluster."""
    for name in [name for name in os.environ if name.startswith("KUBE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", DEMO, "--on", "mars"], "--on mars: choose one of local, "),
        (["run", DEMO, "--on", "kubernetes"], "no cluster: "),
        (["run", DEMO, "--on", "kubernetes", "--overwrite"], "gaudi-bert k8s delete PIPELINE --data"),
        *(
            (["run", DEMO, "--on", "kubernetes", *option], "resources.data_workers and resources.data_processes instead")
            for option in (["--shard", "0/2"], ["--finish"], ["--workers", "2"])
        ),
        (["run", DEMO, "--render", "out", "--set", "prepare.text=mine"], "prepare.text = mine: no such path in a container"),
        (["run", DEMO, "--shard", "0/2"], "--shard: give one stage that can be shared out"),
        (["run", DEMO, "--shard", "0/2", "--stages", "train"], "--shard: give one stage that can be shared out"),
        (
            ["run", DEMO, "--finish", "--stages", "plan"],
            "--finish: give one stage that has a step to finish it",
        ),
        (["run", DEMO, "--finish", "--stages", "write,verify"], "--finish: give one stage"),
        (["run", DEMO, "--finish", "--overwrite", "--stages", "verify"], "--finish and --overwrite exclude each other"),
        (["run", DEMO, "--finish", "--shard", "0/2", "--stages", "write"], "exclude each other"),
        (["wait", DEMO, "--for", "packing"], "--for packing: no such stage"),
        (["k8s", "status", DEMO], "no cluster: "),
        (["k8s", "logs", DEMO], "no cluster: "),
        (["k8s", "delete", DEMO], "no cluster: "),
        (["doctor", "--cluster"], "no cluster: "),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    assert said in refusal(*arguments)
    assert not list(tmp_path.iterdir())


def test_waiting_in_vain_fails_in_the_stated_time_and_for_nothing_returns_at_once() -> None:
    done = run_command("wait", DEMO, "--for", "plan", "--timeout", "0.1")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: work/demo/histogram.json and 1 more: not there after 0.1 s, so plan cannot start")
    done = succeed("wait", DEMO, "--for", "prepare", "--json")
    assert json.loads(done.stdout) == {"stage": "prepare", "waited_seconds": 0.0}


def test_render_writes_what_kubectl_takes(tmp_path: Path) -> None:
    done = succeed("run", DEMO, "--render", "out", "--stages", "plan,train")
    assert "kubectl apply -k out/data" in done.stdout.splitlines()
    assert (tmp_path / "out" / "training" / "train.yaml").exists()
    succeed("run", DEMO, "--render", "out", "--stages", "plan,train")  # into the same folder again is fine


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
    assert ".yaml: differs from what --render would write" in refusal(*command)
    assert manifest.read_text() == before
    succeed(*command, "--overwrite")
    assert ("image: mine" in manifest.read_text()) if how != "edited by hand" else manifest.read_text() == rendered


def test_the_doctor_says_what_to_fix_on_a_machine_without_cards() -> None:
    assert json.loads(succeed("doctor", "--json").stdout)["ready"] is True
    wanted = run_command("doctor", "--json", "--set", "resources.cards=8")
    if json.loads(wanted.stdout)["ready"]:
        pytest.skip("THIS MACHINE HAS GAUDI CARDS: nothing to fix")
    assert wanted.returncode == 1
    findings = {finding["check"]: finding for finding in json.loads(wanted.stdout)["findings"]}
    assert findings["driver"]["verdict"] == "failed"
    assert "checks failed; the first remedy: " in wanted.stderr
