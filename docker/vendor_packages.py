"""Holds the vendor's packages in a Gaudi image as they are: no install of ours may replace its framework or Horovod.

    python3 vendor_packages.py record ENGINE FOLDER CONSTRAINTS    before the install: what is there, how to keep it
    python3 vendor_packages.py check FOLDER                        after it: the build fails if anything of it changed

A package is known by its version and the SHA-256 of all its files, so that a package of another name that writes into the
same folder (tensorflow over tensorflow-cpu, horovod over habana-horovod) is noticed too.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

# The frameworks, Horovod, and what they were built against.
PROTECTED = re.compile(r"torch.*|triton.*|tensorflow.*|keras|.*horovod.*|habana.*|numpy|protobuf")
# Which version of these can be installed goes by the vendor's numpy; what pyproject.toml allows is wide enough.
BY_NUMPY = re.compile(r"scipy|scikit-learn")
# Without these the base is not the vendor's training image for an engine.
REQUIRED = {
    "tensorflow": {"TensorFlow": r"tensorflow(-cpu)?", "Horovod": r".*horovod.*", "habana-tensorflow": r"habana-tensorflow"},
    "pytorch": {"PyTorch": r"torch", "habana-torch-plugin": r"habana-torch-plugin"},
}


def normalised(name: str) -> str:
    """`Habana_TensorFlow` as `habana-tensorflow`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def fingerprint(distribution: Distribution) -> str:
    """SHA-256 over the names and contents of all files of a package; compiled Python is left out."""
    digest = hashlib.sha256()
    for file in sorted(distribution.files or [], key=str):
        path = Path(str(distribution.locate_file(file)))
        if path.suffix == ".pyc":
            continue
        digest.update(f"{file}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"missing")
    return digest.hexdigest()


def protected_packages() -> dict[str, dict[str, str]]:
    """Version and fingerprint of each protected package that Python finds, the first of each name."""
    found: dict[str, dict[str, str]] = {}
    for distribution in distributions():
        name = normalised(distribution.metadata["Name"])
        if PROTECTED.fullmatch(name) and name not in found:
            found[name] = {"version": distribution.version, "sha256": fingerprint(distribution)}
    return found


def kept_constraints(ours: str, packages: dict[str, dict[str, str]]) -> str:
    """Our constraints, but the vendor's versions for the vendor's packages, and none for others that go by them."""
    lines = [line for line in ours.splitlines() if line.strip() and not line.startswith("#")]
    names = [normalised(re.split(r"[=<>! ;]", line)[0]) for line in lines]
    free = [
        line for line, name in zip(lines, names, strict=True) if not (PROTECTED.fullmatch(name) or BY_NUMPY.fullmatch(name))
    ]
    return "\n".join([*free, *(f"{name}=={package['version']}" for name, package in packages.items())]) + "\n"


def record(engine: str, folder: Path, constraints: Path) -> list[str]:
    """Write what is there to `folder`; the problems of a base image that is not the vendor's for `engine`."""
    packages, required = protected_packages(), REQUIRED[engine]
    missing = [title for title, name in required.items() if not any(re.fullmatch(name, found) for found in packages)]
    if missing:
        framework = next(iter(required))
        return [f"the base image has no {', '.join(missing)}: BASE_IMAGE must be the vendor's image with {framework}"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "packages.json").write_text(json.dumps(packages, indent=1) + "\n", encoding="utf-8")
    kept = kept_constraints(constraints.read_text(encoding="utf-8"), packages)
    (folder / "constraints.txt").write_text(kept, encoding="utf-8")
    return []


def changes(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> list[str]:
    """What an install did to the vendor's packages, a line each."""
    problems = []
    for name, package in before.items():
        if name not in after:
            problems.append(f"the vendor's {name} {package['version']} was removed")
        elif after[name]["version"] != package["version"]:
            problems.append(f"the vendor's {name} {package['version']} was replaced by {after[name]['version']}")
        elif after[name] != package:
            problems.append(f"files of the vendor's {name} {package['version']} were replaced")
    added = [f"{name} {package['version']}" for name, package in after.items() if name not in before]
    return problems + [f"{package} was installed beside the vendor's packages" for package in added]


def check(folder: Path) -> list[str]:
    """What changed since `record`."""
    return changes(json.loads((folder / "packages.json").read_text(encoding="utf-8")), protected_packages())


def main() -> None:
    """Do what the command line says; exit code 1 and a line each for problems."""
    action, *rest = sys.argv[1:]
    problems = record(rest[0], *map(Path, rest[1:])) if action == "record" else check(Path(rest[0]))
    sys.stderr.writelines(f"error: {problem}\n" for problem in problems)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
