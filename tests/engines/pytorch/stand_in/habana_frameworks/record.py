"""What happened, a JSON object per line, in a file per process of the folder HPU_STAND_IN; nothing without the variable."""

from __future__ import annotations

import json
import os
from pathlib import Path

# Read by the vendor's software while it is loaded.
VARIABLES = ("PT_HPU_LAZY_MODE", "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST")
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "HLS_MODULE_ID")


def record(call: str, variables: tuple[str, ...] = (), **facts: object) -> None:
    """Write one line; `variables` of the environment with it."""
    folder = os.environ.get("HPU_STAND_IN")
    if folder is None:
        return
    environment = {name: os.environ[name] for name in variables if name in os.environ}
    with Path(folder, f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"call": call, "environment": environment, **facts}) + "\n")
