"""The stage `pack`: histogram, plan and write in one call, for a folder of records and nothing else.

The histogram and the plan are stored next to the packed folder, in `<out>-plan/`.
"""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.artefacts.packed import Metadata, Verification
from gaudi_bert.artefacts.results import PackResult
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import check_name
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.tfrecords.histogram import OnBadFile, histogram
from gaudi_bert.tfrecords.plan import plan
from gaudi_bert.tfrecords.write import write


def pack(
    records: str | Path,
    out: Path,
    settings: PackingSettings,
    *,
    reporter: Reporter,
    overwrite: bool = False,
    on_bad_file: OnBadFile = "stop",
    workers: int | None = None,
    store: StoreSettings | None = None,
) -> PackResult[Metadata, Verification]:
    """Pack `records` (a folder, a file or a glob of unpacked TFRecords) into the folder `out`.

    `on_bad_file` is as for `histogram`.
    """
    check_name(out)
    if Path(records).is_dir() and out.resolve() == Path(records).resolve():
        raise InputError(f"{out}: the output folder is the input folder; choose another one")
    histogram_path = out.with_name(f"{out.name}-plan") / "histogram.json"
    plan_path = histogram_path.with_name("plan.json")
    histogram(
        records,
        histogram_path,
        on_bad_file=on_bad_file,
        reporter=reporter,
        overwrite=overwrite,
        workers=workers,
        store=store,
    )
    planned = plan([histogram_path], plan_path, settings, reporter=reporter, overwrite=overwrite, store=store)
    written = write(records, plan_path, out, reporter=reporter, overwrite=overwrite, workers=workers, store=store)
    return PackResult(written, planned)
