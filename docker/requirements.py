"""Prints what pyproject.toml requires, so that an image's packages are a layer of their own, made again only if they change.

python3 requirements.py [--extras tensorflow,parquet] [--without scipy,highspy] >requirements.txt
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, on Python 3.10 by the reader inside pip."""
    try:
        import tomllib
    except ModuleNotFoundError:
        from pip._vendor import tomli as tomllib
    return tomllib.loads(path.read_text(encoding="utf-8"))


def package_name(requirement: str) -> str:
    """`NumPy>=1.23,<2` as `numpy`."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def requirements(project: dict[str, Any], extras: list[str], without: list[str]) -> list[str]:
    """The requirements of the project and of `extras`, but for the packages in `without`.

    Raises:
        KeyError: there is no such extra.
        ValueError: a package of `without` is not required at all.
    """
    lines = list(project["dependencies"])
    for extra in extras:
        lines += of_extra(project, extra)
    unknown = set(without) - {package_name(line) for line in lines}
    if unknown:
        raise ValueError(f"--without {','.join(sorted(unknown))}: pyproject.toml does not require it")
    return sorted({line for line in lines if package_name(line) not in without})


def of_extra(project: dict[str, Any], extra: str) -> list[str]:
    """The requirements of an extra, in place of each other extra that it names those of that one."""
    lines = []
    for line in project["optional-dependencies"][extra]:
        named = re.fullmatch(rf"{re.escape(project['name'])}\[([^]]*)\]", line)
        lines += [found for name in named[1].split(",") for found in of_extra(project, name)] if named else [line]
    return lines


def names(text: str) -> list[str]:
    """`a,b` as a list."""
    return [name for name in text.split(",") if name]


def main() -> None:
    """Print the requirements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--extras", type=names, default=[])
    parser.add_argument("--without", type=names, default=[])
    parser.add_argument("--pyproject", type=Path, default=Path(__file__).parent / "pyproject.toml")
    arguments = parser.parse_args()
    project = read_toml(arguments.pyproject)["project"]
    sys.stdout.write("\n".join(requirements(project, arguments.extras, arguments.without)) + "\n")


if __name__ == "__main__":
    main()
