"""The plan of a run: the published batches, corrected betas, figures for every share of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.training.run_plan import (
    CADENCE_SETTINGS,
    DryRun,
    RowPacks,
    RunPlan,
    RunSettings,
    find_micro_batch_size,
    format_plan,
    format_schedule,
)
from tests.builders.agree import agree

PHASE_2 = TrainingSettings(
    optimizer="lamb",
    global_batch_sequences=32_768,
    micro_batch_packs=8,
    updates=1564,
    warmup_updates=200,
    evaluate_every_updates=100,
    save_every_updates=100,
    log_every_updates=10,
)


def plan(settings: TrainingSettings, factor: float, processes: int = 8, packs: int | None = 1_000_000) -> RunPlan:
    return RunPlan(RunSettings.from_training_section(settings), factor, processes, slots_per_pack=512, packs=packs)


def batch(sequences: int, packs: int, factor: float, processes: int = 1) -> RunPlan:
    """How an update of `sequences` is put together of micro-batches of `packs`."""
    settings = TrainingSettings(global_batch_sequences=sequences, micro_batch_packs=packs)
    return plan(settings, factor, processes, packs=None)


def test_or_the_packs_are_kept_and_the_betas_raised() -> None:
    """Theorem D.1: beta 0.81 becomes 0.6561 at two sequences per pack."""
    settings = PHASE_2.model_copy(update={"packing_correction": "betas", "beta_1": 0.81})
    unpacked = plan(settings, 1.0).settings
    assert unpacked == RunSettings.from_training_section(settings), "unpacked data is trained as requested"
    made = plan(settings, 2.0)
    changed = made.settings
    agree([changed.beta_1, changed.beta_2], [0.6561, 0.999**2])
    assert (changed.updates, changed.warmup_updates) == (782, 100)
    assert (changed.evaluate_every_updates, changed.save_every_updates, changed.log_every_updates) == (50, 50, 5)
    assert changed.learning_rate == settings.learning_rate
    assert (made.accumulation_steps, made.packs_per_update, made.sequences_per_update) == (512, 32_768, 65_536)
    assert abs(made.relative_batch_size_deviation) < 0.02
    assert "1,564 -> 782" in format_plan(made)[1]


@given(factor=st.floats(1, 40), updates=st.integers(1, 100), warmup=st.integers(0, 100))
def test_nothing_becomes_zero(factor: float, updates: int, warmup: int) -> None:
    settings = TrainingSettings(packing_correction="betas", updates=updates, warmup_updates=warmup, global_batch_sequences=1)
    made = plan(settings, factor)
    changed = made.settings
    assert (changed.warmup_updates >= 1) == (warmup >= 1)
    assert min(made.accumulation_steps, *(getattr(changed, name) for name in CADENCE_SETTINGS)) >= 1
    assert 0 <= changed.beta_1 < 1


def test_the_batch_is_kept_and_so_is_all_else_in_the_figures_of_a_dry_run() -> None:
    made = plan(PHASE_2, 2.0, processes=16)
    assert made.settings == RunSettings.from_training_section(PHASE_2)
    assert (made.accumulation_steps, made.sequences_per_update) == (128, 32_768)
    figures = DryRun(made).as_json()
    assert (figures["packs_per_update"], figures["sequences"]) == (16_384, 32_768 * 1564)
    assert json.loads(json.dumps(figures)) == figures
    assert format_schedule(made)[0].endswith("3,276,800 sequences")
    assert "times the data" in format_plan(made)[-1]
    assert "times the data" not in format_plan(plan(PHASE_2, 2.0, packs=None))[-1]


@pytest.mark.parametrize(
    ("sequences", "packs", "factor", "change", "said"),
    [
        (64, 64, 2.0, 1.0, "100.0% more than .* = 64; training.micro_batch_packs = 32 would come closest to it"),
        (9, 8, 1.157, 0.0284, "2.8% more than .* = 9"),  # no number of packs is nearer
        (128, 64, 1.7, -0.15, "15.0% fewer than .* = 128; training.micro_batch_packs = 75 would come closest to it"),
    ],
)
def test_one_step_is_not_rounded_to_none_and_another_batch_is_said_with_the_remedy(
    sequences: int, packs: int, factor: float, change: float, said: str
) -> None:
    made = batch(sequences, packs, factor)
    assert made.accumulation_steps == 1
    agree(made.relative_batch_size_deviation, change, 1e-3, scale=1.0)
    (line,) = format_plan(made)[1:-1]
    assert re.fullmatch(f"note: that is {said}", line)


@given(sequences=st.integers(1, 100_000), packs=st.integers(1, 200), factor=st.floats(1, 30), processes=st.integers(1, 64))
def test_never_zero_and_as_near_as_whole_micro_batches_allow(sequences, packs, factor, processes) -> None:
    made, one = batch(sequences, packs, factor, processes), packs * factor * processes
    assert made.accumulation_steps >= 1
    assert made.accumulation_steps == 1 or abs(made.sequences_per_update - sequences) <= one / 2 * (1 + 1e-9)


def test_a_micro_batch_comes_as_near_to_the_batch_as_whole_packs_allow() -> None:
    """Of at most eight packs of five sequences: one for 7, eight for 40, twice seven for 70."""
    assert [find_micro_batch_size(sequences, 5.0, 8) for sequences in (7, 40, 70)] == [1, 8, 7]


def packs_after(made: RunPlan, updates: int) -> list[list[int]]:
    """The packs of each length after 0, 1, ... updates, each taken once and in its turn by micro-batches that hold them."""
    after = [[0] * len(made.packs_by_row_length)]
    for update in range(1, updates + 1):
        done, of_update = list(after[-1]), made.list_micro_batches(update)
        assert of_update
        for each in of_update:
            assert each.first == done[each.row_length_index] < each.end <= each.first + each.packs * made.processes
            done[each.row_length_index] = each.end
        assert sum(done) == made.count_packs_read(update)
        after.append(done)
    return after


@given(
    packs=st.lists(st.integers(1, 60), min_size=2, max_size=3),
    sequences=st.integers(1, 200),
    most=st.integers(1, 9),
    processes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_an_update_has_its_share_of_every_length_whoever_reads_it(packs, sequences, most, processes) -> None:
    settings = TrainingSettings(global_batch_sequences=sequences, micro_batch_packs=most)
    rows = tuple(RowPacks(64 << number, each) for number, each in enumerate(packs))
    began = replace(plan(settings, 2.0, processes[0], packs=sum(packs)), packs_by_row_length=rows)
    continued = replace(began, processes=processes[1], initial_processes=processes[0])
    updates = began.count_updates(epochs=3)
    after = packs_after(began, updates)
    assert after == packs_after(continued, updates)
    finished = [all(done >= 3 * row.packs for done, row in zip(each, rows, strict=True)) for each in after]
    assert finished == [*[False] * updates, True]
    for made in (began, continued):
        counts = [
            np.bincount([each.row_length_index for each in made.list_micro_batches(update)], minlength=3)
            for update in (1, 2, 3)
        ]
        assert (np.max(counts, axis=0) == counts[0]).all()
        assert made.accumulation_steps == counts[0].sum()
        assert all(
            each.packs <= most * rows[-1].length // rows[each.row_length_index].length for each in made.list_micro_batches(1)
        )
    assert next(continued.iterate_micro_batches(3, continued.count_packs_read(3))) == continued.list_micro_batches(4)[0]
    with pytest.raises(InputError, match="update 3: the run has read more or fewer packs"):
        next(continued.iterate_micro_batches(3, continued.count_packs_read(3) + 1))
    shares = [
        float(each.blocks_per_update * each.packs) / row.packs
        for each, row in zip(began.block_plan_by_row_length, rows, strict=True)
    ]
    agree(shares, [shares[0]] * len(rows))
    assert began.sequences_per_update >= sequences * (1 - 1e-9)


def test_a_batch_larger_than_the_data_is_said_with_the_remedy() -> None:
    settings = TrainingSettings(global_batch_sequences=128, micro_batch_packs=16)
    lines = format_plan(plan(settings, 2.0, processes=2, packs=51))
    assert "training.global_batch_sequences = 64," in lines[1]
    remedied = settings.model_copy(update={"global_batch_sequences": 64})
    assert not any("repeat" in line for line in format_plan(plan(remedied, 2.0, processes=2, packs=51)))
    few = format_plan(plan(settings, 2.0, processes=2, packs=9))
    assert any("global_batch_sequences = 16 and training.micro_batch_packs = 4, or" in line for line in few)
    assert not any("repeat" in line for line in format_plan(plan(settings, 2.0, processes=2, packs=64)))


@pytest.mark.parametrize(
    ("slots", "mean_tokens", "is_long"),
    [(1024, None, False), (1024, 256.0, False), (1024, 255.0, True), (520, 20.0, True), (512, 20.0, False)],
)
def test_rows_that_are_much_longer_than_the_texts_get_a_note(slots, mean_tokens, is_long) -> None:
    """But for short rows, where attention costs little."""
    lines = format_plan(replace(plan(PHASE_2, 2.0), slots_per_pack=slots, mean_tokens=mean_tokens))
    assert any(f"rows of {slots:,} tokens are" in line for line in lines) == is_long
