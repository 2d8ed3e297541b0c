"""Sends what a run has to look at through a pod's log: the page, TensorBoard's files and the metrics.

A log is what any account of a run may read, and no port has to be reached. The files go as a compressed archive in lines of
base64, with their size and SHA-256 before them, so that a log that was cut short is never taken for whole. A node keeps
10 MiB of a log, as a rule: TensorBoard's files are left out where they would not fit.

    python3 -m gaudi_bert.runners.send_results WORKDIR
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from gaudi_bert.common.errors import FailedError, GaudiBertError
from gaudi_bert.common.progress import Reporter, human_bytes

__all__ = ["received_files", "sent_lines"]

MOST_BYTES = 6 << 20
_LINE_BYTES = 6144
_FIRST = re.compile(r"-----BEGIN RESULTS (\d+) ([0-9a-f]{64})-----")
_LAST = "-----END RESULTS-----"
_RUNS = ("train", "finetune")


def sent_lines(folder: Path, reporter: Reporter) -> Iterator[str]:
    """The lines that carry the results of a work folder.

    Raises:
        FailedError: even the page alone is too large.
    """
    files = [folder / "report.html", *(folder / run / "metrics.jsonl" for run in _RUNS)]
    boards = [path for run in _RUNS for path in sorted((folder / run / "tensorboard").rglob("*"))]
    data = _archive(folder, [*files, *boards])
    if len(data) > MOST_BYTES:
        reporter.say(f"{folder}: TensorBoard's files are too large for a log, left out; copy them with `kubectl cp`")
        data = _archive(folder, files)
    if len(data) > MOST_BYTES:
        raise FailedError(f"{folder}: the page has {human_bytes(len(data))}, too much for a log; copy it with `kubectl cp`")
    yield f"-----BEGIN RESULTS {len(data)} {hashlib.sha256(data).hexdigest()}-----"
    for start in range(0, len(data), _LINE_BYTES):
        yield base64.b64encode(data[start : start + _LINE_BYTES]).decode("ascii")
    yield _LAST


def received_files(lines: Iterable[str]) -> dict[PurePosixPath, bytes]:
    """The files that the lines of a log carry, by their paths in the work folder.

    Raises:
        FailedError: the lines are not there, or not whole.
    """
    rest = iter(lines)
    first = next((match for line in rest if (match := _FIRST.fullmatch(line))), None)
    if first is None:
        raise FailedError("the pod's log holds no results; see `kubectl logs`, and copy the work folder with `kubectl cp`")
    coded = []
    for line in rest:
        if line == _LAST:
            break
        coded.append(line)
    try:
        data = b"".join(base64.b64decode(line, validate=True) for line in coded)
    except binascii.Error:
        data = b""
    if len(data) != int(first[1]) or hashlib.sha256(data).hexdigest() != first[2]:
        raise FailedError("the results did not come whole through the pod's log; copy the work folder with `kubectl cp`")
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        members = [member for member in archive if member.isreg() and ".." not in PurePosixPath(member.name).parts]
        return {PurePosixPath(member.name): archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]


def _archive(folder: Path, files: Iterable[Path]) -> bytes:
    """Those of `files` that are there, as a compressed archive."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for path in filter(Path.is_file, files):
            archive.add(path, str(path.relative_to(folder)))
    return content.getvalue()


def main() -> int:
    """Write the page anew, as far as the run has come, and send it."""
    from gaudi_bert.stages.report import report

    folder, reporter = Path(sys.argv[1]), Reporter()
    try:
        report(folder, reporter=reporter)
        for line in sent_lines(folder, reporter):
            sys.stdout.write(line + "\n")
    except GaudiBertError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
