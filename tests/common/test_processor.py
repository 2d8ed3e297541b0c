"""The instructions of processors, by what the kernel says of them and what the user allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_bert.common.processor import read_processor


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
