from __future__ import annotations

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.runners.compile_kernels import compile_kernels
from gaudi_bert.tfrecords.scanning.unpacked_index import scan_unpacked


def test_the_kernels_that_read_records() -> None:
    compile_kernels("records")
    assert scan_unpacked.signatures


def test_an_unknown_part() -> None:
    with pytest.raises(InputError, match="'record' is not a part of the kernels; known: all, demo, records, packing, nnls"):
        compile_kernels("record")
