"""The module `torch.hpu`, as far as PyTorch and this project ask it."""

from __future__ import annotations

import torch


class Stream(torch.Stream):
    """torch.compile asks for the class."""


class Event(torch.Event):
    """torch.compile asks for the class."""


def device_count() -> int:
    return 8


def is_available() -> bool:
    return True


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
