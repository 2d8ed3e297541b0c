"""The stage `estimate`: what packing would give at each depth and with each algorithm, before anything is written."""

from __future__ import annotations

import difflib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter, human_bytes, human_seconds
from gaudi_bert.config import PackingSettings

if TYPE_CHECKING:
    from gaudi_bert.packing.histogram import Histogram

__all__ = ["estimate"]

Result = TypeVar("Result")

WITHOUT_DEPTH = ("none", "greedy", "greedy+1", "greedy+2", "sort")
"""Algorithms to which a depth says nothing (`none`, `sort`) or that the paper runs without one (greedy): shown once."""


def estimate(
    source: str | Path,
    *,
    depths: Sequence[str | int],
    algorithms: Sequence[str],
    picture: Path | None = None,
    reporter: Reporter,
) -> dict[str, Any]:
    """Pack a histogram in many ways and compare.

    Args:
        source: a histogram.json, or unpacked records (folder, file or glob), which are counted first.
        depths: numbers from 1, or "max".
        algorithms: names as in `ESTIMATE_ALGORITHMS`.
        picture: also draw, as .png or .svg, efficiency over depth; and beside it, with `-histogram`, `-mixture` and
            `-scaling` in the name, the lengths with the proven bound, the strategies, and packing against un-padding.
        reporter: where progress goes.

    Returns:
        `rows` (a row for each algorithm and depth), `length_scan`, `unpadding`, totals of the data, and `lines` for people.

    Raises:
        InputError: a bad source, depth, algorithm or picture name.
    """
    from gaudi_bert.stages.histogram_file import read_histograms

    wanted_depths = [_depth(depth) for depth in depths]
    names = _known_algorithms(algorithms)
    if picture is not None and picture.suffix.lower() not in (".png", ".svg"):
        raise InputError(f"{picture}: a picture is written as .png or .svg; give it one of these endings")
    if Path(source).suffix == ".json":
        histogram = read_histograms([Path(source)]).histogram
    else:
        histogram = _count(source, reporter)
    rows = _compare(histogram, wanted_depths, names, reporter)
    packed = [row for row in rows if row["algorithm"] != "sort"]
    result = {
        "source": str(source),
        "max_sequence_length": histogram.max_sequence_length,
        "sequences": histogram.sequences,
        "tokens": histogram.tokens,
        "token_bound": histogram.token_bound,
        "rows": rows,
        "length_scan": _scan(histogram, wanted_depths[-1]),
        "unpadding": _unpadding(histogram, max(row["packing_factor"] for row in packed) if packed else 1.0),
    }
    if picture is not None:
        usual = PackingSettings().depth
        depth = usual if usual in wanted_depths else wanted_depths[-1]
        result["pictures"] = _draw(histogram, result, depth, picture, reporter)
    return {**result, "lines": _lines(result)}


def _depth(depth: str | int) -> str | int:
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


def _count(records: str | Path, reporter: Reporter) -> Histogram:
    """The histogram of unpacked records."""
    from gaudi_bert.stages.histogram import histogram
    from gaudi_bert.stages.histogram_file import read_histograms

    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "histogram.json"
        histogram(records, counted, shard=None, reporter=reporter)
        return read_histograms([counted]).histogram


def _compare(
    histogram: Histogram, depths: Sequence[str | int], algorithms: Sequence[str], reporter: Reporter
) -> list[dict[str, Any]]:
    """One row for each algorithm and depth, with its time and the memory it took on top of what was there."""
    from gaudi_bert.packing.algorithms import depth_of
    from gaudi_bert.packing.estimate import estimate_packing
    from gaudi_bert.packing.exact.bounds import lower_bound

    def number(depth: str | int) -> int:
        return depth_of(depth, histogram.max_sequence_length)

    jobs = [(name, depth) for name in algorithms for depth in (depths if name not in WITHOUT_DEPTH else _one_depth(name))]
    limits = sorted({number(depth) for _, depth in jobs})
    measured = []
    with reporter.task("estimate", len(limits) + len(jobs), "packings") as task:
        bounds = {}
        for limit in limits:
            bounds[limit] = lower_bound(histogram.counts, limit)
            task.advance()
        _warm_up(algorithms)
        for name, depth in jobs:
            row, seconds, memory = _measured(partial(estimate_packing, histogram, name, depth, bounds[number(depth)]))
            measured.append((row, seconds, memory))
            bounds[number(depth)] = max(bounds[number(depth)], row.lower_bound or 0)
            task.advance()
    # The best proof found at a depth holds for every row of that depth, those before it too.
    rows = []
    for row, seconds, memory in measured:
        if row.lower_bound is not None:
            row = replace(row, lower_bound=bounds[number(row.depth)])
        rows.append({**asdict(row), "gap": row.gap, "seconds": round(seconds, 4), "memory_bytes": memory})
    return rows


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


def _measured(function: Callable[[], Result]) -> tuple[Result, float, int | None]:
    """The result, its seconds, and by how many bytes the peak of resident memory rose above what was in use before."""
    before = _reset_peak()
    started = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - started
    after = _status_bytes("VmHWM")
    return result, seconds, None if before is None or after is None else max(after - before, 0)


def _reset_peak() -> int | None:
    """Reset the kernel's record of the peak (Linux); the memory in use now, or None where that cannot be known."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _draw(histogram: Histogram, result: dict[str, Any], depth: str | int, picture: Path, reporter: Reporter) -> list[str]:
    """Write the pictures; those of a single packing show `nnls` at `depth`. Returns their names."""
    from gaudi_bert.packing.algorithms import pack_histogram
    from gaudi_bert.reporting import packing_pictures

    packing = pack_histogram(histogram, "nnls", depth)
    prices = None if packing.certificate is None else packing.certificate.prices.tolist()
    scaling = result["unpadding"]["rows"]
    figures = {
        "": packing_pictures.draw_efficiency_over_depth([row for row in result["rows"] if row["algorithm"] != "sort"]),
        "-histogram": packing_pictures.draw_histogram(histogram.counts.tolist(), packing.packs, packing.lower_bound, prices),
        "-mixture": packing_pictures.draw_mixture(packing.mixture, histogram.max_sequence_length),
        "-scaling": packing_pictures.draw_unpadding(
            [row["accelerators"] for row in scaling],
            [row["unpadding"] for row in scaling],
            [row["ideal_unpadding"] for row in scaling],
            result["unpadding"]["packing_factor"],
        ),
    }
    paths = [picture.with_name(f"{picture.stem}{suffix}{picture.suffix}") for suffix in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        packing_pictures.save_picture(figure, path)
    reporter.say(f"pictures: {', '.join(str(path) for path in paths)}")
    return [str(path) for path in paths]


def _scan(histogram: Histogram, depth: str | int) -> list[dict[str, Any]]:
    from gaudi_bert.packing.estimate import scan_lengths

    return [asdict(row) for row in scan_lengths(histogram, depth)]


def _unpadding(histogram: Histogram, packing_factor: float) -> dict[str, Any]:
    from gaudi_bert.packing.unpadding import ACCELERATORS, fit_one_device, linear_speed_up, speed_up

    one_device = fit_one_device()
    return {
        "one_device": asdict(one_device),
        "packing_factor": packing_factor,
        "rows": [
            {
                "accelerators": count,
                "unpadding": speed_up(one_device, count),
                "ideal_unpadding": linear_speed_up(histogram, count),
                "packing": packing_factor,
            }
            for count in ACCELERATORS
        ],
    }


def _lines(result: dict[str, Any]) -> list[str]:
    """The tables for people."""
    unpacked = result["tokens"] / (result["sequences"] * result["max_sequence_length"])
    lines = [
        f"{result['sequences']:,} sequences of up to {result['max_sequence_length']} tokens, {100 * unpacked:.2f} % of the"
        f" slots used unpacked; the tokens alone need {result['token_bound']:,} packs",
        "",
        f"{'algorithm':<10} {'depth':>5} {'packs':>13} {'above bound':>12} {'efficiency':>11} {'factor':>7}"
        f" {'strategies':>10} {'time':>9} {'memory':>9}",
    ]
    for row in result["rows"]:
        above = "-" if row["gap"] is None else f"{row['gap']:,}"
        strategies = "-" if row["strategies_used"] is None else f"{row['strategies_used']:,}"
        memory = "-" if row["memory_bytes"] is None else human_bytes(row["memory_bytes"])
        note = f"  ({row['algorithm_used']})" if row["algorithm_used"] != row["algorithm"] else ""
        lines.append(
            f"{row['algorithm']:<10} {row['depth']!s:>5} {row['packs']:>13,} {above:>12}"
            f" {100 * row['efficiency']:>9.3f} % {row['packing_factor']:>7.4f} {strategies:>10}"
            f" {_short_time(row['seconds']):>9} {memory:>9}{note}"
        )
    lines += ["", "packs of another length (LPFHP; slots and attention relative to one sequence a pack):"]
    lines += [
        f"  {row['max_sequence_length']:>6}: {row['packs']:>12,} packs, efficiency {100 * row['efficiency']:.2f} %,"
        f" {row['fewer_slots']:.3f} x fewer slots, attention x {row['attention_cost']:.3f}"
        for row in result["length_scan"]
    ]
    lines += [
        "",
        "speed-up over the number of accelerators: un-padding (paper E) / ideal un-padding of these data / packing:",
    ]
    lines += [
        f"  {row['accelerators']:>6}: {row['unpadding']:.3f} / {row['ideal_unpadding']:.3f} / {row['packing']:.3f}"
        for row in result["unpadding"]["rows"]
    ]
    return lines


def _short_time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else human_seconds(seconds)
