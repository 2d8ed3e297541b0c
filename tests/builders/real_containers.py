"""Names that the tests of real containers share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from gaudi_bert import __version__

BASE = "gaudi-bert-base:bookworm"
DATA = f"gaudi-bert-data:{__version__}"
TRAIN = f"gaudi-bert-train-cpu:{__version__}"
# Debian's: the first one on the PATH may be a newer client that cannot build without a plugin.
DOCKER = "/usr/bin/docker"

Docker = Callable[..., subprocess.CompletedProcess[str]]
