from __future__ import annotations

import pytest

from gaudi_bert.reporting.figures import percent


@pytest.mark.parametrize(
    ("share", "decimals", "written"),
    [
        (0.9949, 1, "99.5 %"),
        (0.9949, 2, "99.49 %"),
        (0.99997, 2, "99.997 %"),
        (0.999951, 2, "99.995 %"),
        (200 / 6_294_495, 2, "0.003 %"),
        (1, 2, "100.00 %"),
        (0, 1, "0.0 %"),
        (1e-30, 1, "0.000000000 %"),
        (1.5, 1, "150.0 %"),
    ],
)
def test_nothing_is_rounded_to_all_or_nothing(share: float, decimals: int, written: str) -> None:
    assert percent(share, decimals).replace("\u00a0", " ") == written
