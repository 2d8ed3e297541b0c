"""Makes wheels of packages that only have a name, a version and a few files. Usage: make_wheels.py FOLDER ENGINE."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

# The vendor's bridge between PyTorch and cards, on a machine without any: tests/engines/pytorch/stand_in, beside this file.
BRIDGE = Path(__file__).with_name("stand_in")
# Distribution, version, files.
PACKAGES: dict[str, tuple[tuple[str, str, dict[str, str]], ...]] = {
    "tensorflow": (
        ("tensorflow_cpu", "2.15.0", {"tensorflow/__init__.py": "__version__ = '2.15.0'\n"}),
        ("habana_tensorflow", "1.14.0.493", {"habana_frameworks/__init__.py": ""}),
        ("habana_horovod", "1.14.0.493", {"horovod/__init__.py": "made_by = 'vendor'\n"}),
    ),
    "pytorch": (
        (
            "habana_torch_plugin",
            "1.24.0.1",
            {
                file.relative_to(BRIDGE).as_posix(): file.read_text()
                for file in sorted(BRIDGE.rglob("*.*"))
                if file.is_file()
            },
        ),
    ),
}


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Write one wheel."""
    information = f"{name}-{version}.dist-info"
    files = {
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        **files,
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: stand-in\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{information}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{information}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)


def main() -> None:
    """Write those of one engine."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES[sys.argv[2]]:
        make_wheel(folder, *package)


if __name__ == "__main__":
    main()
