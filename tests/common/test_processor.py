"""The instructions of processors, the cores that a process may use, and items that are processed in threads in order."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.processor import choose_worker_count, count_usable_cores, map_in_threads, read_processor
from tests.builders.command_line import run_python


@pytest.fixture
def _a_machine_of_96_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))


def cores_with(folder: Path, own: str, **limits: str) -> int:
    """The cores where /proc/self/cgroup is `own`, and the control groups hold `limits`: each file's path and its text."""
    for path, text in limits.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "own").write_text(own)
    return count_usable_cores(folder, folder / "own")


@pytest.mark.usefixtures("_a_machine_of_96_cores")
@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", 96), ("400000 100000\n", 4), ("150000 100000\n", 2), ("1000 100000\n", 1), ("20000000 100000\n", 96),
     ("nonsense\n", 96), ("100000 0\n", 96)],
)  # fmt: skip
def test_a_limit_of_version_2(text: str, cores: int, tmp_path: Path) -> None:
    assert cores_with(tmp_path, "0::/\n", **{"cpu.max": text}) == cores


@pytest.mark.usefixtures("_a_machine_of_96_cores")
def test_the_smallest_limit_of_a_group_and_those_above_it_counts(tmp_path: Path) -> None:
    limits = {"pods/cpu.max": "800000 100000", "pods/a/cpu.max": "max 100000", "pods/a/b/cpu.max": "1600000 100000"}
    assert cores_with(tmp_path, "0::/pods/a/b\n", **limits) == 8
    assert cores_with(tmp_path, "0::/other\n") == count_usable_cores(tmp_path, tmp_path / "missing") == 96


@pytest.mark.usefixtures("_a_machine_of_96_cores")
def test_a_limit_of_version_1(tmp_path: Path) -> None:
    """Inside a container the folder that /proc names is missing: its own group is the root of what it sees."""
    own = "11:cpuset:/docker/abc\n4:cpuacct,cpu:/docker/abc\n0::/system.slice\n"
    assert cores_with(tmp_path, own, **{"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}) == 96
    assert cores_with(tmp_path, own, **{"cpu/cpu.cfs_quota_us": "300000\n"}) == 3
    below = {"cpu/docker/abc/cpu.cfs_quota_us": "100000\n", "cpu/docker/abc/cpu.cfs_period_us": "50000\n"}
    assert cores_with(tmp_path, own, **below) == 2


def test_both_engines_start_as_many_threads_as_a_limit_allows() -> None:
    code = (
        "import os\n"
        "from gaudi_bert.common import processor\n"
        "processor.count_cores_if_limited = lambda: 3\n"
        "for name in [name for name in os.environ if name.startswith(('OMP_', 'TF_'))]: del os.environ[name]\n"
        "import gaudi_bert.engines.pytorch, gaudi_bert.engines.tensorflow\n"
        "print(*map(os.environ.get, ('OMP_NUM_THREADS', 'TF_NUM_INTRAOP_THREADS', 'TF_NUM_INTEROP_THREADS')))\n"
    )
    done = run_python(code)
    assert done.stdout.split() == ["3", "3", "3"], done.stderr


# --- work in threads


def no_buffer() -> np.ndarray:
    return np.zeros(0, np.uint8)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    assert list(map_in_threads(lambda number, _: number**2, range(333), workers, no_buffer)) == [n**2 for n in range(333)]


def test_results_that_wait_behind_a_slow_item_are_few() -> None:
    taken, slow = count(), threading.Event()

    class Items(list):
        def __iter__(self) -> Iterator[int]:
            return (number for number, _ in zip(super().__iter__(), taken, strict=False))

    def work(number: int, _: np.ndarray) -> int:
        if number == 100:
            slow.set()  # item 0 is done only when others, which come after it, are
        return number if number or slow.wait(60) else -1

    results = map_in_threads(work, Items(range(10_000)), 2, no_buffer)
    assert next(results) == 0
    assert 100 < next(taken) < 200
    assert list(results) == list(range(1, 10_000))


def test_the_first_error_in_the_order_of_the_items_is_raised() -> None:
    def work(number: int, _: np.ndarray) -> int:
        if number >= 50:
            raise InputError(f"item {number}")
        return number

    with pytest.raises(InputError, match="item 50"):
        list(map_in_threads(work, range(500), 3, no_buffer))


def test_all_results_before_the_first_error_are_yielded() -> None:
    has_failed = threading.Event()

    def work(number: int, _: np.ndarray) -> int:
        if number == 51:
            has_failed.set()
            raise InputError(f"item {number}")
        assert number < 49 or has_failed.wait(60)  # items 49 and 50 end after a later item has failed
        return number

    results = []
    with pytest.raises(InputError, match="item 51"):
        results.extend(map_in_threads(work, range(500), 3, no_buffer))
    assert results == list(range(51))


def test_as_many_threads_as_items_or_cores_and_never_none() -> None:
    assert [choose_worker_count(workers, items) for workers, items in ((4, 2), (1, 9), (3, 0))] == [2, 1, 1]
    with pytest.raises(InputError, match="--workers 0: "):
        choose_worker_count(0, 5)


@pytest.mark.parametrize(
    ("text", "environment", "instructions", "multiplies"),
    [
        ("flags : fpu avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_tile", {}, "AMX", True),
        ("flags : fpu avx2 avx512f avx512_vnni avx512_bf16", {}, "AVX-512 with BF16", True),
        ("flags : fpu avx2 avx512f avx512_vnni", {}, "AVX-512 with VNNI", False),
        ("flags : fpu avx2 avx_vnni", {}, "AVX2", False),
        ("flags : fpu sse4_2", {}, "no AVX2", False),
        ("Features : fp asimd sve bf16", {}, "BF16", True),
        ("Features : fp asimd", {}, "no AVX2", False),
        ("flags : avx2 avx512f avx512_bf16 amx_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "AVX-512 with BF16", True),
        ("flags : avx2 avx512f avx512_bf16 amx_bf16", {"ONEDNN_MAX_CPU_ISA": "avx2"}, "AVX-512", False),
        ("flags : avx2 avx512f avx512_bf16 amx_bf16", {"DNNL_MAX_CPU_ISA": "DEFAULT"}, "AMX", True),
    ],
)
def test_instructions(text: str, environment: dict[str, str], instructions: str, multiplies: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nmodel name : Some CPU\n{text}\n\nprocessor : 1\n{text}\n")
    assert read_processor(tmp_path / "cpuinfo", environment) == ("Some CPU", instructions, multiplies)


def test_a_system_without_that_file(tmp_path: Path) -> None:
    found = read_processor(tmp_path / "cpuinfo", {})
    assert found.name
    assert not found.multiplies_bfloat16
