"""The stage `estimate`: what packing would give at each depth and with each algorithm, before anything is written."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_bert.artefacts.store.workplace import local_copy
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.measured import Measured, measured
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PackingSettings
from gaudi_bert.packing.estimate import Estimate
from gaudi_bert.stages.estimates.shipped_histograms import find_shipped_histogram

if TYPE_CHECKING:
    from gaudi_bert.packing.estimate import LengthEstimate
    from gaudi_bert.packing.histogram import Histogram
    from gaudi_bert.packing.unpadding import Gumbel

__all__ = ["EstimateResult", "EstimateRow", "UnpaddingEstimate", "UnpaddingRow", "estimate", "histogram_of", "parse_depth"]

WITHOUT_DEPTH = ("none", "greedy", "greedy+1", "greedy+2", "sort")
"""Algorithms to which a depth says nothing (`none`, `sort`) or that the paper runs without one (greedy): shown once."""


@dataclass(frozen=True)
class EstimateRow(Estimate):
    """One algorithm at one depth, and what it took.

    Attributes:
        seconds: wall time, without compiling.
        memory_bytes: on top of what was in use before; None where the operating system does not tell.
    """

    seconds: float
    memory_bytes: int | None


@dataclass(frozen=True)
class UnpaddingRow:
    """Expected speed-up on some accelerators: un-padding as the paper measured it, an ideal one of these data, packing."""

    accelerators: int
    unpadding: float
    ideal_unpadding: float
    packing: float


@dataclass(frozen=True)
class UnpaddingEstimate:
    """Packing against un-padding; `one_device` is the distribution of one device's speed-up."""

    one_device: Gumbel
    packing_factor: float
    rows: list[UnpaddingRow]


@dataclass(frozen=True)
class EstimateResult:
    """What `estimate` found.

    Attributes:
        source: the records, the histogram or the name that it was asked about.
        token_bound: packs that the tokens alone need.
        rows: one per algorithm and depth.
        length_scan: packs of other lengths.
        pictures: files that were drawn.
    """

    source: str
    max_sequence_length: int
    sequences: int
    tokens: int
    token_bound: int
    rows: list[EstimateRow]
    length_scan: list[LengthEstimate]
    unpadding: UnpaddingEstimate
    pictures: list[str] | None = None


def estimate(
    source: str | Path,
    *,
    depths: Sequence[str | int],
    algorithms: Sequence[str],
    picture: Path | None = None,
    reporter: Reporter,
) -> EstimateResult:
    """Pack a histogram in many ways and compare.

    Args:
        source: a histogram.json, the name of one that ships with the package (`wikipedia-512`), or unpacked records
            (folder, file or glob), which are counted first.
        depths: numbers from 1, or "max".
        algorithms: names as in `ESTIMATE_ALGORITHMS`.
        picture: also draw, as .png or .svg, efficiency over depth; and beside it, with `-histogram`, `-mixture` and
            `-scaling` in the name, the lengths with the proven bound, the strategies, and packing against un-padding.
        reporter: where progress goes.

    Raises:
        InputError: a bad source, depth, algorithm or picture name.
    """
    from gaudi_bert.packing.estimate import scan_lengths

    wanted_depths = [parse_depth(depth) for depth in depths]
    names = _known_algorithms(algorithms)
    if picture is not None and picture.suffix.lower() not in (".png", ".svg"):
        raise InputError(f"{picture}: a picture is written as .png or .svg; give it one of these endings")
    histogram = histogram_of(source, reporter)
    rows = _compare(histogram, wanted_depths, names, reporter)
    factors = [row.packing_factor for row in rows if row.algorithm != "sort"]
    result = EstimateResult(
        source=str(source),
        max_sequence_length=histogram.max_sequence_length,
        sequences=histogram.sequences,
        tokens=histogram.tokens,
        token_bound=histogram.token_bound,
        rows=rows,
        length_scan=scan_lengths(histogram, wanted_depths[-1]),
        unpadding=_compare_with_unpadding(histogram, max(factors, default=1.0)),
    )
    if picture is None:
        return result
    usual = PackingSettings().depth
    depth = usual if usual in wanted_depths else wanted_depths[-1]
    return replace(result, pictures=_draw(histogram, result, depth, picture, reporter))


def parse_depth(depth: str | int) -> str | int:
    """A depth as a number, or "max".

    Raises:
        InputError: it is neither.
    """
    text = str(depth).strip()
    if text == "max":
        return text
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"depth {text!r}: write whole numbers from 1, or `max`, with commas between")
    return int(text)


def _known_algorithms(algorithms: Sequence[str]) -> list[str]:
    from gaudi_bert.packing.estimate import ESTIMATE_ALGORITHMS

    names = [name.strip() for name in algorithms]
    for name in names:
        if name not in ESTIMATE_ALGORITHMS:
            near = difflib.get_close_matches(name, ESTIMATE_ALGORITHMS, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(ESTIMATE_ALGORITHMS)}"
            raise InputError(f"algorithm `{name}` is unknown; {hint}")
    return names


def histogram_of(source: str | Path, reporter: Reporter) -> Histogram:
    """The lengths that `source` has: those of a histogram, or of records, which are counted."""
    from gaudi_bert.stages.data.counted_records import read_histograms
    from gaudi_bert.stages.data.histogram import histogram

    shipped = find_shipped_histogram(source)
    if shipped is not None or Path(source).suffix == ".json":
        with local_copy(shipped or Path(source)) as path:
            return read_histograms([path]).histogram
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "histogram.json"
        histogram(source, counted, shard=None, reporter=reporter)
        return read_histograms([counted]).histogram


def _compare(
    histogram: Histogram, depths: Sequence[str | int], algorithms: Sequence[str], reporter: Reporter
) -> list[EstimateRow]:
    """One row per algorithm and depth, with its time and the memory it took on top of what was there."""
    from gaudi_bert.packing.algorithms import depth_of
    from gaudi_bert.packing.estimate import estimate_packing
    from gaudi_bert.packing.exact.bounds import lower_bound
    from gaudi_bert.packing.work import estimate_limit

    def number(depth: str | int) -> int:
        return depth_of(depth, histogram.max_sequence_length)

    jobs = [(name, depth) for name in algorithms for depth in (depths if name not in WITHOUT_DEPTH else _one_depth(name))]
    limits = sorted({number(depth) for _, depth in jobs})
    estimates: list[Measured[Estimate]] = []
    work = estimate_limit(histogram.max_sequence_length)
    with reporter.task("estimate", len(limits) + len(jobs), "packings") as task:
        bounds = {}
        for limit in limits:
            bounds[limit] = lower_bound(histogram.counts, limit, work and work.share(1 / (len(limits) + len(jobs))))
            task.advance()
        _warm_up(algorithms)
        for place, (name, depth) in enumerate(jobs):
            share = work and work.share(1 / (len(jobs) - place))  # what others leave unused is for those after them
            pack = partial(estimate_packing, histogram, name, depth, bounds[number(depth)], work=share)
            estimates.append(measured(pack))
            bounds[number(depth)] = max(bounds[number(depth)], estimates[-1].result.lower_bound or 0)
            task.advance()
    # The best proof found at a depth holds for every row of that depth, those before it too.
    return [_row(made, bounds[number(made.result.depth)]) for made in estimates]


def _row(made: Measured[Estimate], lower_bound: int) -> EstimateRow:
    found = made.result if made.result.lower_bound is None else replace(made.result, lower_bound=lower_bound)
    given = {field.name: getattr(found, field.name) for field in fields(found) if field.init}
    return EstimateRow(**given, seconds=round(made.seconds, 4), memory_bytes=made.memory_bytes)


def _one_depth(name: str) -> tuple[str | int, ...]:
    return (1,) if name in ("none", "sort") else ("max",)


def _warm_up(algorithms: Sequence[str]) -> None:
    """Load the compiled kernels with a tiny histogram, so that no row's time holds a compiler's."""
    import numpy as np

    from gaudi_bert.packing.estimate import estimate_packing
    from gaudi_bert.packing.histogram import Histogram

    tiny = Histogram(16, np.arange(1, 17))
    for name in algorithms:
        estimate_packing(tiny, name, 3, None)


def _compare_with_unpadding(histogram: Histogram, packing_factor: float) -> UnpaddingEstimate:
    from gaudi_bert.packing.unpadding import ACCELERATORS, fit_one_device, linear_speed_up, speed_up

    one_device = fit_one_device()
    rows = [
        UnpaddingRow(count, speed_up(one_device, count), linear_speed_up(histogram, count), packing_factor)
        for count in ACCELERATORS
    ]
    return UnpaddingEstimate(one_device, packing_factor, rows)


def _draw(histogram: Histogram, result: EstimateResult, depth: str | int, picture: Path, reporter: Reporter) -> list[str]:
    """Write the pictures; those of a single packing show `nnls` at `depth`. Returns their names."""
    from gaudi_bert.packing.algorithms import pack_histogram
    from gaudi_bert.reporting import packing_pictures

    packing = pack_histogram(histogram, "nnls", depth)
    prices = None if packing.certificate is None else packing.certificate.prices.tolist()
    scaling = result.unpadding.rows
    over_depth = [asdict(row) for row in result.rows if row.algorithm != "sort"]
    figures = {
        "": packing_pictures.draw_efficiency_over_depth(over_depth),
        "-histogram": packing_pictures.draw_histogram(histogram.counts.tolist(), packing.packs, packing.lower_bound, prices),
        "-mixture": packing_pictures.draw_mixture(packing.mixture, histogram.max_sequence_length),
        "-scaling": packing_pictures.draw_unpadding(
            [row.accelerators for row in scaling],
            [row.unpadding for row in scaling],
            [row.ideal_unpadding for row in scaling],
            result.unpadding.packing_factor,
        ),
    }
    paths = [picture.with_name(f"{picture.stem}{suffix}{picture.suffix}") for suffix in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        packing_pictures.save_picture(figure, path)
    reporter.say(f"pictures: {', '.join(str(path) for path in paths)}")
    return [str(path) for path in paths]
