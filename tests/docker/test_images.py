"""The Dockerfiles as text, the images as they were built, and the small programs that run while an image is built."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.pages import load_module
from tests.builders.real_containers import BASE, DATA, TRAIN, TRAIN_PYTORCH, Docker, build

ROOT = Path(__file__).resolve().parents[2]

# As strict as a cluster: any user, a root that cannot be written, no rights at all.
STRICT = ("run", "--rm", "--read-only", "--tmpfs", "/tmp", "--user", "54321:54321", "--cap-drop", "ALL", "--network", "none")


def python(docker: Docker, image: str, code: str, *options: str) -> str:
    return docker(*STRICT, *options, "--entrypoint", "python3", image, "-c", code).stdout.strip()


@pytest.mark.parametrize("image", [DATA, TRAIN, TRAIN_PYTORCH])
def test_labels_and_user_of_images_that_end_with_their_work(docker: Docker, image: str) -> None:
    config = json.loads(docker("image", "inspect", image).stdout)[0]["Config"]
    assert config["User"] == "1000:1000"
    assert config["Labels"]["org.opencontainers.image.version"] == image.rpartition(":")[2]
    assert not config.get("Healthcheck")
    assert docker(*STRICT, image, "--version").stdout.strip() == f"gaudi-bert {image.rpartition(':')[2]}"


@pytest.mark.parametrize("image", [DATA, TRAIN, TRAIN_PYTORCH])
def test_no_layer_keeps_anything_of_the_build_machine(docker: Docker, image: str) -> None:
    history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image).stdout
    assert socket.gethostname() not in history.split()
    for name in ("PIP_CERT", "PIP_CONFIG_FILE", "PIP_INDEX_URL", "PIP_FIND_LINKS"):
        if os.environ.get(name):
            assert os.environ[name] not in history
    find = "find / -xdev ( -path /run/secrets/* -o -name ssh_host_*_key -o -name pip.conf -o -name .netrc ) -type f"
    assert docker("run", "--rm", "--user", "0", "--entrypoint", "find", image, *find.split()[1:]).stdout == ""


def test_each_image_has_what_it_needs_and_no_other_engine(docker: Docker) -> None:
    """Fine-tuning tokenizes and plans, so the training image has a tokenizer and a solver too."""
    names = ["tensorflow", "horovod", "highspy", "tokenizers", "matplotlib", "jinja2"]
    code = f"import importlib.util; print([name for name in {names} if importlib.util.find_spec(name)])"
    assert python(docker, DATA, code) == "['highspy', 'tokenizers', 'matplotlib', 'jinja2']"
    assert python(docker, TRAIN, code) == "['tensorflow', 'horovod', 'highspy', 'tokenizers']"
    assert "tensorflow" not in python(docker, TRAIN_PYTORCH, code)
    assert python(docker, TRAIN_PYTORCH, "import torch, transformers; print(torch.version.cuda)") == "None"


def test_the_training_image_has_horovod_over_gloo_and_mpi_and_an_sshd(docker: Docker) -> None:
    code = "import horovod, horovod.tensorflow as h; print(h.gloo_built(), bool(h.mpi_built()), horovod.__version__)"
    assert python(docker, TRAIN, code, "--env", "TF_CPP_MIN_LOG_LEVEL=3") == "True True 0.28.1"
    assert docker("run", "--rm", "--entrypoint", "mpirun", TRAIN, "--version").stdout.startswith("mpirun (Open MPI) 4.1")
    script = "mkdir -p /run/sshd && ssh-keygen -A >/dev/null && /usr/sbin/sshd -T -o StrictModes=no | grep -i ^strictmodes"
    done = docker("run", "--rm", "--user", "0", "--entrypoint", "/bin/sh", TRAIN, "-c", script)
    assert done.stdout.strip() == "strictmodes no"


@pytest.mark.parametrize("image", [DATA, TRAIN_PYTORCH])
def test_images_whose_processes_meet_by_themselves_have_neither_mpi_nor_ssh(image: str, docker: Docker) -> None:
    code = "import shutil; print([name for name in ('mpirun', 'ssh', 'sshd', 'ssh-keygen') if shutil.which(name)])"
    assert python(docker, image, code, "--env", "PATH=/usr/sbin:/usr/bin:/bin") == "[]"


@pytest.mark.parametrize("image", [DATA, TRAIN, TRAIN_PYTORCH])
def test_kernels_are_there_already_whoever_runs_them(docker: Docker, image: str) -> None:
    code = f"""
from numba.core import event
from gaudi_bert.common import crc32c
assert crc32c.HAS_CRC_INSTRUCTIONS
program = {{"__name__": "compile_kernels"}}
exec({(FOLDER / "compile_kernels.py").read_text()!r}, program)
with event.install_recorder("numba:compile") as compiled:
    program["compile_kernels"]("records")
print(len(compiled.buffer))
"""
    assert python(docker, image, code) == "0"


def test_an_image_of_gaudi_keeps_the_vendors_packages(docker: Docker) -> None:
    """On a stand-in for the vendor's image: made-up TensorFlow, Horovod and bridge of the right names and versions."""
    stand_in = ROOT / "tests" / "docker" / "stand-in"
    done = build(stand_in / "vendor.Dockerfile", stand_in, "gaudi-bert-test-vendor", BASE_IMAGE=BASE)
    assert done.returncode == 0, done.stderr[-3000:]
    gaudi = ROOT / "docker" / "train-gaudi.Dockerfile"
    done = build(gaudi, ROOT, "gaudi-bert-test-gaudi", BASE_IMAGE="gaudi-bert-test-vendor")
    assert done.returncode == 0, done.stderr[-3000:]
    code = "import tensorflow, horovod, gaudi_bert; print(tensorflow.__version__, horovod.made_by, gaudi_bert.__version__)"
    shown = docker("run", "--rm", "--entrypoint", "python3", "gaudi-bert-test-gaudi", "-c", code).stdout.strip()
    assert shown == f"2.15.0 vendor {DATA.rpartition(':')[2]}"
    assert docker("run", "--rm", "gaudi-bert-test-gaudi", "--version").returncode == 0
    reads = "from gaudi_bert.artefacts import object_store; print(*object_store._retryable_errors('s3'))"
    assert "botocore" in docker("run", "--rm", "--entrypoint", "python3", "gaudi-bert-test-gaudi", "-c", reads).stdout
    docker("image", "rm", "gaudi-bert-test-gaudi", "gaudi-bert-test-vendor")


# --- the Dockerfiles as text: hadolint, and what it does not look for


FOLDER = ROOT / "docker"
FILES = sorted(FOLDER.glob("*.Dockerfile"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_hadolint_finds_nothing_but_unpinned_debian_packages(file: Path) -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert program is not None, "hadolint is not installed; run `make setup-test`"
    done = subprocess.run([program, "--ignore", "DL3008", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_comes_from_where_it_must_not(file: Path) -> None:
    text = file.read_text()
    assert not re.search(r"^# *syntax=", text, re.MULTILINE), "BuildKit would fetch a frontend"
    assert "privileged" not in text
    assert re.search(r"^ARG BASE_IMAGE=\S+:\S+$", text, re.MULTILINE), "the base image is named with its version"
    # What is lent to the build comes as secrets: build arguments and COPY would stay in the image.
    assert not re.search(r"^(ARG|ENV|COPY|ADD).*(PIP_CERT|PIP_CONF|PIP_INDEX|PASSWORD|TOKEN)", text, re.MULTILINE)
    steps = re.findall(r"^RUN (?:.*\\\n)*.*$", text, re.MULTILINE)
    installing = [step for step in steps if "pip-install --" in step]
    assert installing == [step for step in steps if "type=secret,id=ca_bundle" in step]
    if "gaudi" in file.name:
        assert all("vendor_packages.py check" in step for step in installing), "what replaces the vendor's is noticed"


@pytest.mark.parametrize("name", ["data.Dockerfile", "train-cpu.Dockerfile"])
def test_images_without_cards_do_not_run_as_root(name: str) -> None:
    users = re.findall(r"^USER (.*)$", (FOLDER / name).read_text(), re.MULTILINE)
    assert users == ["1000:1000"]


# --- the small programs that run while an image is built or when its Python starts, without Docker


requirements, vendor = (load_module(FOLDER / f"{name}.py") for name in ("requirements", "vendor_packages"))


def test_requirements_come_from_the_project_and_its_extras() -> None:
    extras = {"tensorflow": ["tensorflow-cpu>=2.15"], "cpu": ["ours[tensorflow]"], "all": ["ours[cpu,parquet]"]}
    extras["parquet"] = ["arrow"]
    project = {"name": "ours", "dependencies": ["numpy>=1.23,<2", "scipy"], "optional-dependencies": extras}
    assert requirements.requirements(project, ["all"], []) == ["arrow", "numpy>=1.23,<2", "scipy", "tensorflow-cpu>=2.15"]
    assert requirements.requirements(project, ["cpu"], ["scipy"]) == ["numpy>=1.23,<2", "tensorflow-cpu>=2.15"]
    with pytest.raises(ValueError, match="does not require it"):
        requirements.requirements(project, [], ["absent"])


def package(site: Path, name: str, version: str, files: dict[str, str]) -> None:
    """A package as pip would have installed it."""
    listed = []
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        listed.append(f"{path},,")
    information = site / f"{name}-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (information / "RECORD").write_text("\n".join(listed) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where Python finds packages, and our constraints beside it."""
    constraints = "# ours\nnumpy==1.26.4\nhorovod==0.28.1\nrich==15.0.0\ntorch==2.13.0\n"
    (tmp_path / "constraints.txt").write_text(constraints)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    return tmp_path / "site"


def record(site: Path, engine: str) -> list[str]:
    return vendor.record(engine, site.parent / "kept", site.parent / "constraints.txt")  # type: ignore[no-any-return]


def kept(site: Path) -> set[str]:
    return set((site.parent / "kept" / "constraints.txt").read_text().splitlines())


def test_what_replaces_the_vendors_packages_is_noticed(site: Path) -> None:
    """Another version, a package that writes into the same folder, and one that is removed."""
    package(site, "tensorflow_cpu", "2.15.0", {"tensorflow/__init__.py": "vendor"})
    package(site, "habana_horovod", "1.14.0.493", {"horovod/__init__.py": "vendor"})
    package(site, "habana_tensorflow", "1.14.0.493", {"habana_frameworks/__init__.py": "vendor"})
    package(site, "numpy", "1.23.5", {"numpy/__init__.py": "vendor"})
    assert record(site, "tensorflow") == []
    assert {"rich==15.0.0", "numpy==1.23.5", "tensorflow-cpu==2.15.0"} <= kept(site)
    assert not any(line.startswith("horovod") for line in kept(site))
    package(site, "rich", "15.0.0", {"rich/__init__.py": "ours"})
    assert vendor.check(site.parent / "kept") == []
    (site / "tensorflow_cpu-2.15.0.dist-info").rename(site / "old")
    (site / "habana_tensorflow-1.14.0.493.dist-info").rename(site / "older")
    package(site, "tensorflow_cpu", "2.15.1", {"tensorflow/__init__.py": "ours"})
    package(site, "horovod", "0.28.1", {"horovod/__init__.py": "ours"})
    assert set(vendor.check(site.parent / "kept")) == {
        "the vendor's tensorflow-cpu 2.15.0 was replaced by 2.15.1",
        "files of the vendor's habana-horovod 1.14.0.493 were replaced",
        "horovod 0.28.1 was installed beside the vendor's packages",
        "the vendor's habana-tensorflow 1.14.0.493 was removed",
    }


def test_a_base_that_is_not_the_vendors_is_refused(site: Path) -> None:
    package(site, "tensorflow_cpu", "2.15.0", {"tensorflow/__init__.py": "anyone's"})
    for engine, missing in (("tensorflow", "Horovod, habana-tensorflow"), ("pytorch", "PyTorch, habana-torch-plugin")):
        (problem,) = record(site, engine)
        assert problem.startswith(f"the base image has no {missing}: ")


def test_the_vendors_pytorch_is_kept_by_its_local_version(site: Path) -> None:
    package(site, "torch", "2.10.0+hpu.1.24.0.1", {"torch/__init__.py": "vendor"})
    package(site, "habana_torch_plugin", "1.24.0.1", {"habana_frameworks/torch/__init__.py": "vendor"})
    assert record(site, "pytorch") == []
    assert {line for line in kept(site) if "torch" in line} == {
        "habana-torch-plugin==1.24.0.1",
        "torch==2.10.0+hpu.1.24.0.1",
    }
    (site / "torch" / "__init__.py").write_text("ours")
    assert vendor.check(site.parent / "kept") == ["files of the vendor's torch 2.10.0+hpu.1.24.0.1 were replaced"]
