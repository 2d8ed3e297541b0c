"""The small programs that run while an image is built or when its Python starts, without Docker."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docker"


def load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


requirements = load("requirements")
vendor = load("vendor_packages")


def test_requirements_come_from_the_project_and_its_extras() -> None:
    extras = {"tensorflow": ["tensorflow-cpu>=2.15"], "cpu": ["ours[tensorflow]"], "all": ["ours[cpu,parquet]"]}
    extras["parquet"] = ["arrow"]
    project = {"name": "ours", "dependencies": ["numpy>=1.23,<2", "scipy"], "optional-dependencies": extras}
    assert requirements.requirements(project, ["all"], []) == ["arrow", "numpy>=1.23,<2", "scipy", "tensorflow-cpu>=2.15"]
    assert requirements.requirements(project, ["cpu"], ["scipy"]) == ["numpy>=1.23,<2", "tensorflow-cpu>=2.15"]
    with pytest.raises(ValueError, match="does not require it"):
        requirements.requirements(project, [], ["absent"])


@pytest.mark.parametrize(
    ("arguments", "absent"), [(["--extras", "parquet,kubernetes"], "tensorflow"), (["--extras", "cpu"], "docker")]
)
def test_requirements_of_this_project(arguments: list[str], absent: str) -> None:
    command = [sys.executable, FOLDER / "requirements.py", *arguments, "--pyproject", FOLDER.parent / "pyproject.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "numba" in done.stdout
    assert absent not in done.stdout


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


def run_vendor(site: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """vendor_packages.py with the packages of `site` alone."""
    code = f"""import runpy, sys
sys.path[:] = [sys.argv[1], *(path for path in sys.path if "site-packages" not in path)]
sys.argv[:2] = ["vendor"]
runpy.run_path({str(FOLDER / "vendor_packages.py")!r}, run_name="__main__")
"""
    command = [sys.executable, "-c", code, str(site), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The vendor's packages, recorded."""
    site = tmp_path / "site"
    package(site, "tensorflow_cpu", "2.15.0", {"tensorflow/__init__.py": "vendor"})
    package(site, "habana_horovod", "1.14.0.493", {"horovod/__init__.py": "vendor"})
    package(site, "habana_tensorflow", "1.14.0.493", {"habana_frameworks/__init__.py": "vendor"})
    package(site, "numpy", "1.23.5", {"numpy/__init__.py": "vendor"})
    (tmp_path / "constraints.txt").write_text("# ours\nnumpy==1.26.4\nhorovod==0.28.1\nrich==15.0.0\n")
    done = run_vendor(site, "record", "tensorflow", tmp_path / "kept", tmp_path / "constraints.txt")
    assert done.returncode == 0, done.stderr
    return site


def test_the_vendors_versions_take_the_place_of_ours(site: Path, tmp_path: Path) -> None:
    kept = (tmp_path / "kept" / "constraints.txt").read_text().splitlines()
    assert "rich==15.0.0" in kept
    assert "numpy==1.23.5" in kept
    assert "tensorflow-cpu==2.15.0" in kept
    assert not any(line.startswith("horovod") for line in kept)


def test_an_install_beside_the_vendors_packages_is_fine(site: Path, tmp_path: Path) -> None:
    package(site, "rich", "15.0.0", {"rich/__init__.py": "ours"})
    assert run_vendor(site, "check", tmp_path / "kept").returncode == 0


def test_another_version_is_noticed(site: Path, tmp_path: Path) -> None:
    (site / "tensorflow_cpu-2.15.0.dist-info").rename(site / "old")
    package(site, "tensorflow_cpu", "2.15.1", {"tensorflow/__init__.py": "ours"})
    done = run_vendor(site, "check", tmp_path / "kept")
    assert done.returncode == 1
    assert "error: the vendor's tensorflow-cpu 2.15.0 was replaced by 2.15.1" in done.stderr


def test_another_package_that_writes_into_the_same_folder_is_noticed(site: Path, tmp_path: Path) -> None:
    package(site, "horovod", "0.28.1", {"horovod/__init__.py": "ours"})
    done = run_vendor(site, "check", tmp_path / "kept")
    assert done.returncode == 1
    assert "files of the vendor's habana-horovod 1.14.0.493 were replaced" in done.stderr
    assert "horovod 0.28.1 was installed beside the vendor's packages" in done.stderr


def test_a_removed_package_is_noticed(site: Path, tmp_path: Path) -> None:
    (site / "habana_tensorflow-1.14.0.493.dist-info").rename(site / "old")
    assert "habana-tensorflow 1.14.0.493 was removed" in run_vendor(site, "check", tmp_path / "kept").stderr


def test_a_base_that_is_not_the_vendors_is_refused(tmp_path: Path) -> None:
    package(tmp_path / "site", "tensorflow_cpu", "2.15.0", {"tensorflow/__init__.py": "anyone's"})
    (tmp_path / "constraints.txt").write_text("")
    done = run_vendor(tmp_path / "site", "record", "tensorflow", tmp_path / "kept", tmp_path / "constraints.txt")
    assert done.returncode == 1
    assert "the base image has no Horovod, habana-tensorflow" in done.stderr
    done = run_vendor(tmp_path / "site", "record", "pytorch", tmp_path / "kept", tmp_path / "constraints.txt")
    assert "no PyTorch, habana-torch-plugin: BASE_IMAGE must be the vendor's image with PyTorch" in done.stderr


def test_the_vendors_pytorch_is_kept_by_its_local_version(tmp_path: Path) -> None:
    site = tmp_path / "site"
    package(site, "torch", "2.10.0+hpu.1.24.0.1", {"torch/__init__.py": "vendor"})
    package(site, "habana_torch_plugin", "1.24.0.1", {"habana_frameworks/torch/__init__.py": "vendor"})
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\naccelerate==1.15.0\n")
    done = run_vendor(site, "record", "pytorch", tmp_path / "kept", tmp_path / "constraints.txt")
    assert done.returncode == 0, done.stderr
    kept = (tmp_path / "kept" / "constraints.txt").read_text().splitlines()
    assert sorted(kept) == ["accelerate==1.15.0", "habana-torch-plugin==1.24.0.1", "torch==2.10.0+hpu.1.24.0.1"]
    (site / "torch" / "__init__.py").write_text("ours")
    done = run_vendor(site, "check", tmp_path / "kept")
    assert "files of the vendor's torch 2.10.0+hpu.1.24.0.1 were replaced" in done.stderr
