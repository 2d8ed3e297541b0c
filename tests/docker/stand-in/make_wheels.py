"""Makes wheels of packages that only have a name, a version and one module. Usage: make_wheels.py FOLDER."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

# Distribution, version, module, text of the module. The last is what must never be installed over the vendor's.
PACKAGES = (
    ("tensorflow_cpu", "2.15.0", "tensorflow", "__version__ = '2.15.0'"),
    ("habana_tensorflow", "1.14.0.493", "habana_frameworks", ""),
    ("habana_horovod", "1.14.0.493", "horovod", "made_by = 'vendor'"),
    ("horovod", "0.28.1", "horovod", "made_by = 'others'"),
)


def make_wheel(folder: Path, name: str, version: str, module: str, text: str) -> None:
    """Write one wheel."""
    information = f"{name}-{version}.dist-info"
    files = {
        f"{module}/__init__.py": text + "\n",
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: stand-in\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{information}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{information}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)


def main() -> None:
    """Write them all."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    for package in PACKAGES:
        make_wheel(folder, *package)


if __name__ == "__main__":
    main()
