"""Part K of N, as it is typed or as a Slurm array and an Indexed Job say it."""

from __future__ import annotations

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.launch import parse_shard_option


def slurm(task: int, first: int, last: int, count: int | None = None, step: int = 1) -> dict[str, str]:
    """The variables of one task of `sbatch --array=first-last:step`."""
    tasks = (last - first) // step + 1 if count is None else count
    numbers = {"ID": task, "MIN": first, "MAX": last, "COUNT": tasks, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(number) for name, number in numbers.items()}


@pytest.mark.parametrize(
    ("text", "part"), [("0/1", (0, 1)), ("6/7", (6, 7)), ("00/16", (0, 16)), ("99999/100000", (99999, 100000))]
)
def test_a_given_part_is_taken_whatever_the_environment_says(text: str, part: tuple[int, int]) -> None:
    assert parse_shard_option(text, {}) == part
    assert parse_shard_option(text, {**slurm(3, 0, 7), "JOB_COMPLETION_INDEX": "2"}) == part


@pytest.mark.parametrize("first", [0, 1, 17])
def test_the_tasks_of_an_array_are_counted_from_its_first(first: int) -> None:
    parts = [parse_shard_option("auto", slurm(task, first, first + 4)) for task in range(first, first + 5)]
    assert parts == [(0, 5), (1, 5), (2, 5), (3, 5), (4, 5)]

    without_step = {name: value for name, value in slurm(9, 8, 9).items() if name != "SLURM_ARRAY_TASK_STEP"}
    assert parse_shard_option("auto", without_step) == (1, 2)


def test_the_pods_of_an_indexed_job_are_counted_by_their_index() -> None:
    assert [parse_shard_option("auto/3", {"JOB_COMPLETION_INDEX": str(index)}) for index in range(3)] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]


@pytest.mark.parametrize(
    ("text", "found", "said"),
    [
        ("auto", slurm(3, 1, 7, step=2), r"\b4 tasks\b.*\b1 to 7\b.*\b2\b"),
        ("auto", slurm(3, 1, 7, count=3), r"\b3 tasks\b.*\b1 to 7\b.*\b1\b"),
        ("auto", slurm(8, 0, 7), r"SLURM_ARRAY_TASK_ID is 8\b.*\b0 to 7"),
        ("auto", slurm(0, 0, 7) | {"SLURM_ARRAY_TASK_COUNT": "many"}, "SLURM_ARRAY_TASK_COUNT is 'many'"),
        ("auto", {}, "SLURM_ARRAY_TASK_ID is not set.*Slurm array"),
        ("auto", {"JOB_COMPLETION_INDEX": "0"}, "Indexed Job.*auto/N"),
        ("auto/4", {}, "JOB_COMPLETION_INDEX is not set.*Indexed Job"),
        ("auto/4", {"JOB_COMPLETION_INDEX": "4"}, r"from 0 to N - 1, but JOB_COMPLETION_INDEX is 4\b"),
        ("auto/4", {"JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX is ''"),
        ("auto/0", {"JOB_COMPLETION_INDEX": "0"}, "from 0 to N - 1"),
        ("automatic", {}, "K/N .*auto.*auto/N"),
        *((text, {}, "from 0 to N - 1") for text in ("4/4", "0/0", "-1/4", "1", "1/4 ", "٣/4")),
    ],
)
def test_what_is_no_part_is_refused_in_one_line(text: str, found: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        parse_shard_option(text, found)
    assert str(caught.value).startswith(f"--shard {text}: ")
