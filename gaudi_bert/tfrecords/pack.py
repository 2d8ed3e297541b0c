"""The stage `pack`: histogram, plan and write in one call, for a folder of records and nothing else.

The histogram and the plan are stored next to the packed folder, in `<out>-plan/`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gaudi_bert.artefacts.results import PackResult, StageRun, require_complete
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import check_name
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.packs.plan import plan
from gaudi_bert.tfrecords.histogram import OnBadFile, histogram
from gaudi_bert.tfrecords.verify import verify
from gaudi_bert.tfrecords.write import write


def pack(
    records: str | Path,
    out: Path,
    settings: PackingSettings,
    run: StageRun,
    *,
    on_bad_file: OnBadFile = "stop",
    verified: bool = False,
) -> PackResult:
    """Pack `records` (a folder, a file or a glob of unpacked TFRecords) into the folder `out`, in a run that does all parts.

    `on_bad_file` is as for `histogram`; `verified`: prove afterwards that every sequence is there.
    """
    check_name(out)
    if not run.does_all:
        raise InputError(f"{out}: records are packed at once; use `histogram`, `plan` and `write` to share the work")
    if Path(records).is_dir() and out.resolve() == Path(records).resolve():
        raise InputError(f"{out}: the output folder is the input folder; choose another one")
    histogram_path = out.with_name(f"{out.name}-plan") / "histogram.json"
    plan_path = histogram_path.with_name("plan.json")
    histogram(records, histogram_path, run, on_bad_file=on_bad_file)
    planned = plan([histogram_path], plan_path, settings, run)
    written = require_complete(write(records, plan_path, out, run))
    proof = require_complete(verify(records, out, replace(run, overwrite=False))) if verified else None
    return PackResult(written, planned, proof)
