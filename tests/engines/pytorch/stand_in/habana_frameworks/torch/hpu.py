"""The module `torch.hpu`, as far as PyTorch and this project ask it; HPU_STAND_IN_CARDS is how many cards there are."""

from __future__ import annotations

import os

import torch


class Stream(torch.Stream):
    """torch.compile asks for the class."""


class Event(torch.Event):
    """torch.compile asks for the class."""


def device_count() -> int:
    return int(os.environ.get("HPU_STAND_IN_CARDS", "8"))


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def current_device() -> int:
    return 0


def manual_seed(seed: int) -> None:
    """The numbers are those of the CPU's generator, which has the same seed."""


manual_seed_all = manual_seed


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16]
