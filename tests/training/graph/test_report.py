"""What is said of a training step adds up."""

from __future__ import annotations

from gaudi_bert.config import TrainingSettings
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.inputs import BatchSizes
from gaudi_bert.model.parameters import parameter_count
from gaudi_bert.training.graph.report import CARDS, USABLE_SHARE, report_on_step

CONFIG = BertConfig(
    vocab_size=31,
    hidden_size=6,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=10,
    max_position_embeddings=13,
)
SIZES = BatchSizes(packs=5, positions=11, masked_slots=4, depth=2)


def test_the_report_adds_up() -> None:
    one = report_on_step(CONFIG, TrainingSettings(), SIZES, 1, communication_MB=0)
    many = report_on_step(CONFIG, TrainingSettings(), SIZES, 3, communication_MB=0)
    assert one.problems == many.problems == ()
    assert one.parameters == parameter_count(CONFIG)
    assert (one.parameter_bytes, one.optimizer_bytes) == (4 * one.parameters, 8 * one.parameters)
    assert many.flops_per_update == 3 * many.flops_per_micro_batch == 3 * one.flops_per_update
    assert 0 < many.activation_bytes <= many.peak_bytes
    assert [card.card for card in one.cards] == list(CARDS)
    state = many.parameter_bytes + many.optimizer_bytes + many.gradient_bytes
    per_pack = many.peak_bytes / SIZES.packs
    most = int((CARDS["Gaudi"] * USABLE_SHARE - state) / per_pack)
    assert 0.5 * most < many.cards[0].most_packs < 2 * most
    rounded = report_on_step(CONFIG, TrainingSettings(precision="bfloat16"), SIZES, 1, communication_MB=0)
    assert rounded.activation_bytes < one.activation_bytes
    assert rounded.cards[1].most_packs > one.cards[1].most_packs
