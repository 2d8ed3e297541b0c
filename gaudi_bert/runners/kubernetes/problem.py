"""What is wrong with an object of a cluster, and what to do about it, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer", "Problem", "one_line"]

# The JSON of the API server as plain dictionaries, so that recorded answers can be tested.
Answer = Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """What is wrong.

    Attributes:
        reason: what happened, one line.
        remedy: what to do, one line.
        hopeless: whether waiting or trying again cannot help.
        started: whether the pod's containers ran at all.
        only_slow: whether every pod is like this for a while, so that only its length is a problem.
        disrupted: whether the cluster took the pod away, so that the same work may simply be submitted again.
    """

    reason: str
    remedy: str
    hopeless: bool = False
    started: bool = True
    only_slow: bool = False
    disrupted: bool = False

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


def one_line(text: str) -> str:
    """`text` without line breaks and double spaces."""
    return " ".join(text.split())
