"""Find out which vector instructions this processor has, because the speed of matrix products depends on them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

# The flags of /proc/cpuinfo by which oneDNN and MKL choose their kernels, and the names of the instructions, with the widest
# instructions first. `bf16` is the flag of Arm processors.
_INSTRUCTION_SETS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 with BF16",
    "avx512_vnni": "AVX-512 with VNNI",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "bf16": "BF16",
}
_MULTIPLY_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
# Users can limit which instructions oneDNN uses with these environment variables.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_BELOW_BFLOAT16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"})


class Processor(NamedTuple):
    """A processor's name and widest vector instructions, and whether oneDNN multiplies bfloat16 matrices with them."""

    name: str
    instructions: str
    multiplies_bfloat16: bool


def read_processor(cpuinfo: Path = Path("/proc/cpuinfo"), environment: Mapping[str, str] | None = None) -> Processor:
    """Return the name and the vector instructions of this machine's processor.

    Args:
        cpuinfo: The kernel's list of processors. If this file cannot be read, the processor has no flags and its name is
            that of the machine type.
        environment: The environment variables that may limit oneDNN's instructions, by default those of this process.
    """
    variables = os.environ if environment is None else environment
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    limit = next((variables[name].upper() for name in _LIMITS if name in variables), "DEFAULT")
    if limit not in ("DEFAULT", "ALL") and "AMX" not in limit:
        flags.discard("amx_bf16")
    if limit in _BELOW_BFLOAT16:
        flags.discard("avx512_bf16")
    widest = next((name for flag, name in _INSTRUCTION_SETS.items() if flag in flags), "no AVX2")
    return Processor(facts.get("model name", os.uname().machine), widest, not _MULTIPLY_BFLOAT16.isdisjoint(flags))
