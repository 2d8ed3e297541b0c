"""Part K of N: as it is given, or as the scheduler says that started this process. See docs/many-machines.md.

    K/N      part K, from 0
    auto     Slurm's array: K counts from SLURM_ARRAY_TASK_MIN, N is SLURM_ARRAY_TASK_COUNT
    auto/N   an Indexed Job of Kubernetes: K is JOB_COMPLETION_INDEX

The environment is read for the last two only, so that a variable that is left over never changes what a command does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from gaudi_bert.common.errors import InputError

__all__ = ["parse_part"]

_SLURM_ID, _SLURM_FIRST, _SLURM_LAST = "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX"
_SLURM_COUNT, _SLURM_STEP = "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_STEP"
_JOB_INDEX = "JOB_COMPLETION_INDEX"


def parse_part(text: str, environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """`K/N`, `auto` or `auto/N` as (K, N), with 0 <= K < N.

    Args:
        text: what was given.
        environment: variables; by default this process's.

    Raises:
        InputError: not of these forms, K is not in 0 .. N - 1, or the scheduler's variables are missing or no such part.
    """
    found = os.environ if environment is None else environment
    if text == "auto":
        return _slurm_part(found)
    match = re.fullmatch(r"(\d{1,9}|auto)/(\d{1,9})", text, re.ASCII)
    if match is None:
        raise InputError(f"--shard {text}: write K/N with K from 0 to N - 1, for example 0/4; or auto, or auto/N")
    number = _number(text, found, _JOB_INDEX, "an Indexed Job") if match[1] == "auto" else int(match[1])
    if number >= int(match[2]):
        where = f"{_JOB_INDEX} is {number}, " if match[1] == "auto" else ""
        raise InputError(f"--shard {text}: {where}write K/N with K from 0 to N - 1, for example 0/4")
    return number, int(match[2])


def _slurm_part(found: Mapping[str, str]) -> tuple[int, int]:
    """The part of one task of a Slurm array whose numbers follow one another."""
    if _SLURM_ID not in found and _JOB_INDEX in found:
        raise InputError("--shard auto: an Indexed Job does not say how many pods it has; write auto/N")
    task, first, last, count = (
        _number("auto", found, name, "a Slurm array (sbatch --array=0-7)")
        for name in (_SLURM_ID, _SLURM_FIRST, _SLURM_LAST, _SLURM_COUNT)
    )
    step = _number("auto", found, _SLURM_STEP, "a Slurm array") if _SLURM_STEP in found else 1
    if step != 1 or last - first + 1 != count:
        raise InputError(
            f"--shard auto: the {count} tasks of this array go from {first} to {last} in steps of {step}; "
            f"use an array without gaps, --array={first}-{first + count - 1}, or write K/N"
        )
    if not first <= task <= last:
        raise InputError(f"--shard auto: {_SLURM_ID} is {task}, and the array goes from {first} to {last}; write K/N")
    return task - first, count


def _number(text: str, found: Mapping[str, str], name: str, where: str) -> int:
    value = found.get(name)
    if value is None:
        raise InputError(f"--shard {text}: {name} is not set, so this is no part of {where}; write K/N")
    if re.fullmatch(r"\d{1,9}", value, re.ASCII) is None:
        raise InputError(f"--shard {text}: {name} is {value!r}, not a whole number; write K/N")
    return int(value)
