"""What the vendor's library of cards reports (package habana-pyhlml), as one line of JSON.

A separate process, because the library prints, and may end the process where the driver does not answer:

    python3 -m gaudi_bert.runners.doctor.hlml
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def ask_library(library: Any) -> dict[str, Any]:
    """The driver's version, and the name of each card."""
    library.hlmlInit()
    try:
        handles = [library.hlmlDeviceGetHandleByIndex(index) for index in range(library.hlmlDeviceGetCount())]
        names = [_text(library.hlmlDeviceGetName(handle)) for handle in handles]
        return {"driver": _text(library.hlmlGetDriverVersion()), "cards": names}
    finally:
        library.hlmlShutdown()


def _text(value: bytes | str) -> str:
    """A text of the library, which fills its buffers with zeros."""
    return (value.decode("utf-8", "replace") if isinstance(value, bytes) else value).strip("\0 \n")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(ask_library(importlib.import_module("pyhlml"))) + "\n")
