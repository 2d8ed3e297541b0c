"""What every reader of a packed folder is made of: the one order, with windows that cost no more than they must."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.reading.global_order import WINDOW_PACKS, GlobalOrder
from gaudi_bert.reading.streams import StoredPacks
from tests.builders.agree import identical

SIZES = np.array([31, 0, 53, 17, 29])
ROW_GROUPS = [7, 1, 11, 5, 13]


@pytest.mark.parametrize(
    ("window_rows", "shuffle_packs", "expected"),
    [
        (None, None, WINDOW_PACKS),
        (None, 3, 3),
        (ROW_GROUPS.__getitem__, None, ROW_GROUPS.__getitem__),
        (ROW_GROUPS.__getitem__, 9, [7, 1, 9, 5, 9].__getitem__),
    ],
)
def test_packs_move_within_what_is_asked_for_and_what_files_allow(window_rows, shuffle_packs, expected) -> None:
    regions = np.array([2, 2, 0, 1, 1])
    stored = StoredPacks(SimpleNamespace(sizes=SIZES), 2, 2, regions, window_rows)
    order, by_hand = stored.order(7, shuffle_packs), GlobalOrder(SIZES, 7, expected, 2, 2, regions)
    numbers = np.arange(order.packs)
    identical(order.locate(2, numbers)._asdict(), by_hand.locate(2, numbers)._asdict())
    for shard in range(len(SIZES)):
        identical(order.shard_order(2, shard)._asdict(), by_hand.shard_order(2, shard)._asdict())


def test_a_rank_that_no_process_has_is_refused() -> None:
    stored = StoredPacks(SimpleNamespace(sizes=SIZES), 2)
    with pytest.raises(InputError, match=r"rank = 2: 0 to 1 is allowed"):
        stored.reader(stored.order(7), 2, 2)
