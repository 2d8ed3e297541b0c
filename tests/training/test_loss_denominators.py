"""What losses are divided by: on paper, and that `balanced` expects what the data holds."""

from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.config import TrainingSettings
from gaudi_bert.training.distributed.communicator import Communicator
from gaudi_bert.training.input.source import open_source
from gaudi_bert.training.loss_denominators import LossDenominators, denominators_for
from tests.builders import training_data as data

WEIGHTS_M2 = np.array([[6.0, 2.0], [4.0, 3.0], [2.0, 1.0]])
PACKS = data.make_packs(14)


class OneOfThree(Communicator):
    """Beside two processes that hold the same."""

    def sum_array(self, values):
        return 3 * np.asarray(values)


THREE = OneOfThree(rank=1, size=3)


def test_global_divides_by_the_whole_update() -> None:
    factors = LossDenominators("global").factors(WEIGHTS_M2, 5, THREE)
    np.testing.assert_allclose(factors, [[1 / 36, 1 / 18]] * 3)


def test_local_is_the_mean_of_the_means() -> None:
    factors = LossDenominators("local").factors(WEIGHTS_M2, 5, THREE)
    np.testing.assert_allclose(factors, 1 / (9 * WEIGHTS_M2))


def test_balanced_is_a_constant() -> None:
    """b m e and b p (equations 25 and 26), as a mean over nine micro-batches."""
    factors = LossDenominators("balanced", (76 * 0.5, 2.0)).factors(WEIGHTS_M2, 5, THREE)
    np.testing.assert_allclose(factors, [[1 / (5 * 38 * 9), 1 / (5 * 2 * 9)]] * 3)


def test_nothing_masked_divides_by_no_zero() -> None:
    for kind in ("global", "local"):
        assert np.isfinite(LossDenominators(kind).factors(np.zeros((2, 2)), 5, Communicator())).all()


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_what_balanced_expects_of_packs_and_of_single_sequences(tmp_path, loss: str) -> None:
    settings = TrainingSettings(loss_normalization="balanced", loss=loss)
    packed = denominators_for(settings, open_source(data.write_packed(tmp_path / "packed", PACKS)))
    unpacked = denominators_for(settings, open_source(data.write_unpacked(tmp_path / "unpacked", PACKS)))
    lengths = [sequence.length for pack in PACKS for sequence in pack]
    factor, efficiency = len(lengths) / len(PACKS), sum(lengths) / (len(PACKS) * data.LENGTH)
    masked = data.PREDICTIONS * efficiency if loss == "token" else factor
    assert packed.expected_weights == pytest.approx((masked, factor))
    # The same sequences weigh the same whether packed or not: a pack is `factor` of them.
    assert unpacked.expected_weights == pytest.approx((masked / factor, 1.0))


def test_the_others_need_to_know_nothing_of_the_data() -> None:
    for kind in ("global", "local"):
        assert denominators_for(TrainingSettings(loss_normalization=kind), None).kind == kind
