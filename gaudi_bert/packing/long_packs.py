"""Packings for long packs with thousands of distinct lengths, which are first computed on a coarse grid of lengths.

With thousands of distinct lengths, the linear program itself becomes too expensive. Therefore lengths are rounded to a grid
of a few hundred bins, and the program of the bins is solved. Its prices, interpolated to all lengths, prove a lower bound.
Its plan states which bins share a pack, and contains as many slots as there are sequences.

Sequences are then assigned to slots by length. Among the slots of one bin, the fullest pack gets the shortest sequence, so
that rounding errors cancel. A pack that is still too full swaps a sequence with another pack that has enough room, for one
that is shorter by the excess (multi-way partitioning by differences of Karmarkar and Karp 1982, finished by exchanges).
Swaps do not change depths, and with thousands of lengths there is nearly always a suitable pair. If swaps no longer help, an
empty pack is opened, whose slots take part in swaps like sequences of length 0.

`cut_and_recombine_packs` at the end of the file improves any packing by cutting packs in two and combining the parts again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray, draw_random_uint64
from gaudi_bert.common.compiled import kernel
from gaudi_bert.packing.heuristics import add_by_best_fit
from gaudi_bert.packing.strategies import (
    OperationBudget,
    Strategy,
    StrategyCounts,
    add_packs,
    count_strategies,
    fill_planned_packs_with_sequences,
    flatten_packs,
)

# --- constants of long packs, and the reason for each (measured by `benchmarks/packing.py --parts limits`)

MANY_LENGTHS = 2500  # with more distinct lengths than this, the full linear program is too slow and a grid is used
# Long packs with at most this many distinct lengths are planned without rounding the lengths, unless their linear program
# would take too long.
FEW_LENGTHS = 600
BINS = 512  # bins of a grid: its program takes 1 s, and its prices prove a bound within a pack or two
# These coarse grids of rounded lengths are tried in order until the packing is close to its lower bound. Each entry contains
# the number of rounded lengths up to a full pack, and a factor for the slack, the additional length defined below.
GRIDS = ((BINS, 0), (BINS, 1), (BINS, 4), (2 * BINS, 1))
# On a coarse grid with slack, each sequence is planned slightly longer than it is, so that the packs keep some free room.
# The additional length is SLACK_SHARE times the mean length. For all sequences together, it is at least SLACK_PACKS times
# the length of a pack.
SLACK_SHARE, SLACK_PACKS = 3e-5, 0.3
# If a packing exceeds its lower bound by at most 1 / NEAR of the bound, only a few packs can still be saved. Therefore the
# search is cut short.
NEAR = 10_000
LAST_PACK_SHARE = 0.3  # fraction of the budget for finding out whether the last pack can be saved
MATCHED = 200_000  # with more sequences, only some packs are cut and matched again, so that a round takes 20 ms

# The maximum number of sequences that are assigned to slots one by one. More would take gigabytes and minutes.
MAX_ASSIGNED_SEQUENCES = 2_000_000
# If there are more than MAX_ASSIGNED_SEQUENCES sequences, only a subsample of at most this size is packed. Each of the
# resulting packs is repeated, so that the packs hold all sequences. This wastes about 0.002 % of the packs.
THINNED = 500_000
# Packing heuristics take microseconds for each distinct length. If there are more distinct lengths than this, only a
# subsample of at most this many sequences is packed. Each of the resulting packs is repeated, so that the packs hold all
# sequences.
MOST_LENGTHS = 1 << 17

# Packs that were planned for rounded lengths get empty slots, which are places for one sequence each, so that sequences can
# move there without a swap. An empty pack gets up to MOST_EMPTY such slots, and a full pack up to LEAST_EMPTY.
MOST_EMPTY, LEAST_EMPTY = 32, 2
# If swapping sequences can no longer make all packs fit, spare empty packs are opened. Their number is at most 0.02 % of the
# planned packs, or 8 if that is more.
SPARE_SHARE, LEAST_SPARE = 0.0002, 8
MOST_ROUNDS = 1000  # limit of swap rounds, as a safeguard; they normally end earlier
PROBES, PROBES_OF_A_LENGTH = 3000, 32  # sequences that are examined for one swap, in total and per length
WIDEST = 200  # a swap may take at most this many tokens more than the excess
ROOMY = 400  # number of packs with the most room that are examined one by one
FAILURES = 100  # the round ends after this many consecutive packs without a swap
# A round of swaps tries to bring overfull packs down to the pack length. If it succeeds for less than this fraction of the
# packs that it tries, more swaps would hardly help, so the remaining excess tokens are moved to other packs.
FEW_FITTED = 0.01
STALLED = 3  # rounds of that kind before an empty pack is opened
OPERATIONS_PER_ASSIGNED = 500  # operations per sequence, for assigning it to a slot and reading the packs afterwards
# For a round of swaps, the operation budget counts the first number of operations for each pack. It counts the second number
# for each overfull pack that the round tries to reduce.
OPERATIONS_PER_PACK, OPERATIONS_PER_TRIAL = 20, 50_000


class _SlotAssignment(NamedTuple):
    """An assignment of N sequences, sorted by length, to the slots of P packs. A slot is the place of one sequence in a
    pack, and slots are numbered pack by pack.

    There are as many slots as sequences, because empty slots contain sequences of length 0.
    """

    lengths: IntArray  # int64 [N]; 0 for empty slots and for sequences that were removed
    pack: IntArray  # int64 [N], the pack of each sequence
    slot: IntArray  # int64 [N], the slot of each sequence
    sequence: IntArray  # int64 [N], the sequence in each slot
    first_slot: IntArray  # int64 [P + 1], the first slot of each pack
    first_sequence: IntArray  # int64 [L + 2], the first sequence of each length
    excess: IntArray  # int64 [P], tokens in the pack minus L; negative if the pack has room
    pointer: IntArray  # int64 [L + 2], the next sequence of each length to examine, relative to the first


class PartialPacking(NamedTuple):
    """Packs that contain some of the sequences, and the sequences that are in none of them.

    Attributes:
        strategy_counts: The strategy counts of the packs. The packs of `nnls` may have surplus slots.
        unplaced: The number of sequences of each length that are in no pack, int64 [L].
    """

    strategy_counts: StrategyCounts
    unplaced: IntArray


def assign_sequences_to_slots(
    coarse_plan: Mapping[Strategy, int], length_counts: IntArray, bins: int, depth: int, budget: OperationBudget
) -> PartialPacking:
    """Fill packs that were planned with rounded lengths, and swap sequences until no pack contains too many tokens. Return
    the packs and the sequences that did not fit.

    Args:
        coarse_plan: strategies of bins, with exactly as many slots as `length_counts` has sequences.
        length_counts: int64 [L], the number of sequences of length 1 .. L.
        bins: the number of bins that fill a pack.
        depth: the maximum number of sequences per pack.
        budget: the operation budget.
    """
    max_length = len(length_counts)
    spare = max(LEAST_SPARE, int(SPARE_SHARE * sum(coarse_plan.values())))
    # Add empty slots to each planned pack, so that sequences can move there. Packs with more room get more of these slots.
    # The spare packs, which contain only empty slots, come first.
    with_empty = {(0,) * min(depth, MOST_EMPTY): spare}
    for strategy, count in coarse_plan.items():
        slots = min(depth - len(strategy), max(LEAST_EMPTY, MOST_EMPTY * (bins - sum(strategy)) // bins))
        add_packs(with_empty, (0,) * slots + strategy, count)
    bin_of_slot, first_slot = flatten_packs(with_empty)
    empty = len(bin_of_slot) - int(length_counts.sum())
    lengths = np.concatenate((np.zeros(empty, dtype=np.int64), np.repeat(np.arange(1, max_length + 1), length_counts)))
    assignment = _SlotAssignment(
        lengths=lengths,
        pack=np.zeros(len(lengths), dtype=np.int64),
        slot=np.zeros(len(lengths), dtype=np.int64),
        sequence=np.zeros(len(lengths), dtype=np.int64),
        first_slot=first_slot,
        first_sequence=empty + np.concatenate(([0, 0], np.cumsum(length_counts))),
        excess=np.full(len(first_slot) - 1, -max_length),
        pointer=np.zeros(max_length + 2, dtype=np.int64),
    )
    budget.spend(OPERATIONS_PER_ASSIGNED * len(lengths))
    _assign_sequences_to_all_slots(
        assignment, bin_of_slot, np.repeat(np.arange(len(first_slot) - 1), np.diff(first_slot)), max_length / bins
    )
    _swap_sequences_until_packs_fit(assignment, spare, budget)
    removed = _remove_excess_sequences(assignment)
    return PartialPacking(
        count_strategies(assignment.lengths[assignment.sequence], assignment.first_slot),
        np.bincount(removed, minlength=max_length + 1)[1:].astype(np.int64),
    )


def _assign_sequences_to_all_slots(
    assignment: _SlotAssignment, bin_of_slot: IntArray, pack_of_slot: IntArray, tokens_per_bin: float
) -> None:
    """Assign a sequence to every slot of the planned packs, starting with the slots that were planned for the longest
    sequences.

    If a pack contains several slots of the same bin, these are handled one after another.
    """
    number = len(bin_of_slot)
    position = np.arange(number) - assignment.first_slot[pack_of_slot]
    same = np.concatenate(([False], (bin_of_slot[1:] == bin_of_slot[:-1]) & (position[1:] > 0)))
    copy = np.arange(number) - np.maximum.accumulate(np.where(same, 0, np.arange(number)))
    slots = np.lexsort((copy, bin_of_slot))
    new = np.diff(bin_of_slot[slots], prepend=-1) != 0
    group = np.cumsum(new | (np.diff(copy[slots], prepend=-1) != 0))
    # A bin contains sequences of nearly the same length, which will be assigned to several groups of slots. Distribute the
    # sequences of a bin randomly over its groups, and sort the sequences of each group by length.
    shuffled = np.lexsort((draw_random_uint64(number, 0, "slots"), np.cumsum(new)))
    sequences = shuffled[np.lexsort((shuffled, group))]
    ends = np.append(np.flatnonzero(np.diff(group)) + 1, number)
    _assign_sequences_by_slot_group(assignment, pack_of_slot, tokens_per_bin * bin_of_slot, slots, sequences, ends)


@kernel
def _assign_sequences_by_slot_group(
    assignment: _SlotAssignment,
    pack_of_slot: IntArray,
    planned_length_of_slot: FloatArray,
    slots: IntArray,
    sequences: IntArray,
    group_ends: IntArray,
) -> None:
    """Assign sequences to slots, one group of slots with the same planned length at a time. In each group, the fullest pack
    gets the shortest sequence.

    A group contains slots of one bin and as many sequences. `group_ends` are the ends of the groups in `slots` and
    `sequences`.
    """
    error = assignment.excess.astype(np.float64)  # the excess of each pack if the remaining sequences are as long as planned
    for slot in range(pack_of_slot.size):
        error[pack_of_slot[slot]] += planned_length_of_slot[slot]
    for group in range(group_ends.size - 1, -1, -1):
        start = group_ends[group - 1] if group > 0 else 0
        members = slots[start : group_ends[group]]
        order = np.argsort(-error[pack_of_slot[members]], kind="mergesort")
        for position in range(members.size):
            slot, sequence = members[order[position]], sequences[start + position]
            pack = pack_of_slot[slot]
            assignment.sequence[slot], assignment.slot[sequence], assignment.pack[sequence] = sequence, slot, pack
            assignment.excess[pack] += assignment.lengths[sequence]
            error[pack] += assignment.lengths[sequence] - planned_length_of_slot[slot]


def _swap_sequences_until_packs_fit(assignment: _SlotAssignment, spare_pack_count: int, budget: OperationBudget) -> None:
    """Swap sequences between packs until no pack contains too many tokens, or until swaps no longer help.

    The first `spare_pack_count` packs are empty. They are closed at first, and opened one by one if swaps stall.
    """
    room = assignment.excess[:spare_pack_count].copy()
    assignment.excess[:spare_pack_count] = 0
    opened = stalled = 0
    for _ in range(MOST_ROUNDS):
        over = np.flatnonzero(assignment.excess > 0)
        if len(over) == 0 or budget.is_exhausted:
            break
        over = over[np.argsort(-_find_shortest_length_to_remove(assignment, over), kind="stable")]
        roomy = np.argpartition(assignment.excess, min(ROOMY, len(assignment.excess) - 1))[:ROOMY]
        roomy = roomy[np.argsort(assignment.excess[roomy], kind="stable")]
        tried, fitted = _remove_excess_by_swaps(assignment, over, roomy)
        budget.spend(OPERATIONS_PER_PACK * len(assignment.excess) + OPERATIONS_PER_TRIAL * tried)
        if fitted > FEW_FITTED * tried:
            continue
        stalled += 1
        if stalled % STALLED:
            _move_excess_to_other_packs(assignment, over)
        elif opened < spare_pack_count:
            assignment.excess[opened] = room[opened]
            opened += 1
        else:
            break


@kernel
def _find_shortest_length_to_remove(assignment: _SlotAssignment, overfull_packs: IntArray) -> IntArray:
    """For each pack with too many tokens, find the shortest of its sequences that is at least as long as the excess. The
    pack would fit without this sequence. Return the lengths of these sequences, int64 [packs].

    Packs with a large result are handled first.
    """
    result = np.full(overfull_packs.size, assignment.first_sequence.size)
    for number, pack in enumerate(overfull_packs):
        for slot in range(assignment.first_slot[pack], assignment.first_slot[pack + 1]):
            length = assignment.lengths[assignment.sequence[slot]]
            if assignment.excess[pack] <= length < result[number]:
                result[number] = length
    return result


@kernel
def _remove_excess_by_swaps(
    assignment: _SlotAssignment, overfull_packs: IntArray, underfull_packs: IntArray
) -> tuple[int, int]:
    """Try to remove the excess tokens of each pack in `overfull_packs` by swapping sequences with other packs. Return how
    many packs were tried, and how many of them now fit.
    """
    tried = fitted = failures = 0
    for pack in overfull_packs:
        while assignment.excess[pack] > 0 and (
            _swap_with_shorter_sequence(assignment, pack) or _swap_with_underfull_pack(assignment, pack, underfull_packs)
        ):
            pass
        tried += 1
        failures += 1
        if assignment.excess[pack] <= 0:
            # If a swap has left much room in this pack, add it to `underfull_packs`, because later packs may find room
            # there.
            if assignment.excess[pack] < -WIDEST:
                underfull_packs[underfull_packs.size - 1 - fitted % (1 + underfull_packs.size // 2)] = pack
            fitted += 1
            failures = 0
        if failures == FAILURES:
            break
    return tried, fitted


@kernel
def _move_excess_to_other_packs(assignment: _SlotAssignment, overfull_packs: IntArray) -> None:
    """For each pack with too many tokens, try to swap sequences with another pack so that this pack fits and the other pack
    has its excess instead. The other pack contains other lengths, so a later round of swaps may remove the excess from it.
    """
    for pack in overfull_packs:
        excess = assignment.excess[pack]
        if excess > 0:
            _try_swap_and_count_probes(assignment, pack, excess, excess)


@kernel
def _swap_with_shorter_sequence(assignment: _SlotAssignment, pack: int) -> bool:
    """Try to remove the excess tokens of a pack by swapping one of its sequences for one that is shorter by at least the
    excess. Return whether the pack now fits.
    """
    probes = 0
    for taken in range(assignment.excess[pack], assignment.excess[pack] + WIDEST):
        is_swapped, probes_of_length = _try_swap_and_count_probes(assignment, pack, taken, 0)
        if is_swapped:
            return True
        probes += probes_of_length
        if probes > PROBES:
            break
    return False


@kernel
def _try_swap_and_count_probes(
    assignment: _SlotAssignment, pack: int, length_difference: int, max_excess_elsewhere: int
) -> tuple[bool, int]:
    """Try to swap a sequence of the pack for a sequence of another pack that is shorter by exactly `length_difference`
    tokens. Return whether a swap was made, and how many sequences of other packs were examined.

    The other pack may contain at most `max_excess_elsewhere` tokens too many afterwards.
    """
    probes = 0
    for slot in range(assignment.first_slot[pack], assignment.first_slot[pack + 1]):
        sequence = assignment.sequence[slot]
        shorter = assignment.lengths[sequence] - length_difference
        if shorter < 1:
            continue
        first = assignment.first_sequence[shorter]
        equal = assignment.first_sequence[shorter + 1] - first
        for _ in range(min(equal, PROBES_OF_A_LENGTH)):
            probes += 1
            assignment.pointer[shorter] = (assignment.pointer[shorter] + 1) % equal
            other = first + assignment.pointer[shorter]
            if (
                assignment.excess[assignment.pack[other]] + length_difference <= max_excess_elsewhere
                and assignment.lengths[other] == shorter
                and assignment.pack[other] != pack
            ):
                _exchange_sequences(assignment, sequence, other, length_difference)
                return True, probes
    return False, probes


@kernel
def _swap_with_underfull_pack(assignment: _SlotAssignment, pack: int, underfull_packs: IntArray) -> bool:
    """Swap a sequence of a pack with too many tokens for a shorter one in `underfull_packs`, to remove as much of the excess
    as possible. Return whether a swap was possible.
    """
    excess = assignment.excess[pack]
    best, longer, shorter = 0, 0, 0
    for other in underfull_packs:
        room = -assignment.excess[other]
        if room <= 0:
            continue
        for slot in range(assignment.first_slot[pack], assignment.first_slot[pack + 1]):
            one = assignment.sequence[slot]
            for position in range(assignment.first_slot[other], assignment.first_slot[other + 1]):
                two = assignment.sequence[position]
                taken = assignment.lengths[one] - assignment.lengths[two]
                if 0 < taken <= room and (best < taken <= excess or best < excess < taken or excess <= taken < best):
                    best, longer, shorter = taken, one, two
        if best == excess:
            break
    if best > 0:
        _exchange_sequences(assignment, longer, shorter, best)
    return best > 0


@kernel
def _exchange_sequences(assignment: _SlotAssignment, longer: int, shorter: int, difference: int) -> None:
    """Exchange the slots of two sequences. `longer` has `difference` more tokens than `shorter`."""
    one, two = assignment.pack[longer], assignment.pack[shorter]
    assignment.excess[one] -= difference
    assignment.excess[two] += difference
    assignment.pack[longer], assignment.pack[shorter] = two, one
    slot = assignment.slot[longer]
    assignment.slot[longer] = assignment.slot[shorter]
    assignment.slot[shorter] = slot
    assignment.sequence[assignment.slot[longer]], assignment.sequence[slot] = longer, shorter


def _remove_excess_sequences(assignment: _SlotAssignment) -> IntArray:
    """Remove sequences from packs that still contain too many tokens, and return the lengths of the removed sequences,
    int64.
    """
    result: list[int] = []
    for pack in np.flatnonzero(assignment.excess > 0).tolist():
        held = assignment.sequence[assignment.first_slot[pack] : assignment.first_slot[pack + 1]]
        while assignment.excess[pack] > 0:
            lengths = assignment.lengths[held]
            enough = lengths >= min(int(assignment.excess[pack]), int(lengths.max()))
            gone = int(held[np.flatnonzero(enough)[np.argmin(lengths[enough])]])
            result.append(int(assignment.lengths[gone]))
            assignment.excess[pack] -= assignment.lengths[gone]
            assignment.lengths[gone] = 0
    return np.array(result, dtype=np.int64)


# --- coarse grids and subsamples


def split_counts_into_bins(length_counts: IntArray, bins: int, slack: float = 0.0) -> IntArray:
    """Round the lengths of a histogram to a coarse grid of `bins` equally spaced lengths. Return the number of sequences at
    each of them, int64 [bins].

    Bin c stands for c * L / bins tokens. Sequences whose length is between two bins are divided between both, so that the
    numbers of sequences and tokens are preserved to within one bin. Sequences that are shorter than a bin count as one bin.

    Args:
        length_counts: int64 [L], the number of sequences of length 1 .. L.
        bins: the number of bins of a full pack.
        slack: tokens by which each sequence is lengthened, so that the plan leaves some room.
    """
    max_length = len(length_counts)
    result = [0] * (bins + 2)
    carried = 0.0
    for length in (np.flatnonzero(length_counts) + 1).tolist():
        count, (lower, above) = int(length_counts[length - 1]), divmod(length * bins, max_length)
        if lower == 0:
            result[1] += count
            continue
        share = count * (above + slack * bins) / max_length + carried
        raised = min(count, max(0, round(share)))
        carried = share - raised
        result[lower] += count - raised
        result[lower + 1] += raised
    result[bins] += result[bins + 1]  # the carried remainder may have raised sequences of length L
    return np.array(result[1 : bins + 1], dtype=np.int64)


def interpolate_prices(prices: IntArray, max_length: int) -> IntArray:
    """Interpolate prices of the rounded lengths on a coarse grid to get prices of all lengths from 1 to `max_length`, int64.
    The prices never decrease with length.
    """
    bins = len(prices)
    positions = np.arange(1, max_length + 1) * bins / max_length
    fine = np.interp(positions, np.arange(bins + 1), np.concatenate(([0.0], prices)))
    return np.maximum.accumulate(np.floor(fine)).astype(np.int64)


def pack_by_subsample(
    length_counts: IntArray, depth: int, pack_counts: Callable[[IntArray], StrategyCounts], max_subsample: int = THINNED
) -> StrategyCounts:
    """Plan packs for every n-th sequence in the order of length, and use each planned pack n times for all sequences.

    A slot then holds its own sequence
    or one of the n - 1 next shorter ones. The longest sequences, fewer than n, are added by best fit.

    Args:
        length_counts: int64 [L], the number of sequences of length 1 .. L.
        depth: the maximum number of sequences per pack.
        pack_counts: packs the counts of the subsample.
        max_subsample: the maximum number of sequences in the subsample.
    """
    every = -(-int(length_counts.sum()) // max_subsample)
    longest = int(length_counts.sum()) % every
    rest = np.diff(np.minimum(np.cumsum(length_counts[::-1]), longest), prepend=0)[::-1]
    whole = np.cumsum(length_counts - rest) // every
    slots = {strategy: every * count for strategy, count in pack_counts(np.diff(whole, prepend=0)).items()}
    return add_by_best_fit(fill_planned_packs_with_sequences(slots, length_counts - rest), rest, depth)


# --- fewer packs by cutting all packs in two and matching the parts again
#
# Every pack is cut at random into two parts of at most depth // 2 sequences. Then the parts are matched, largest first, each
# with the largest remaining part that fits. This is an optimal matching: if x was matched with w instead of y, the largest
# part that fits, then x and y can exchange partners, because whatever fits with y fits with w. Therefore no round needs more
# packs than the previous one. Room collects in the packs of the smallest parts, until two parts that were alone share a
# pack. This still works where swaps fail, namely with thousands of packs that must be exactly full.

# The search that cuts packs in two and matches the halves again stops after 25 rounds in a row that save no pack. With few
# sequences, it continues until such rounds have handled 10 million sequences.
STALLED_SEQUENCES, LEAST_STALLED = 10_000_000, 25
FEWEST_SEQUENCES = 1000  # a round takes about as long for fewer sequences
# When halves of packs are matched, the operation budget counts this many operations for each sequence, and for each token of
# a pack. Tokens matter because counting sort has a counter for each number of tokens.
OPERATIONS_PER_SEQUENCE, OPERATIONS_PER_TOKEN = 100, 5


def cut_and_recombine_packs(
    strategy_counts: StrategyCounts, max_length: int, depth: int, target_packs: int, budget: OperationBudget
) -> StrategyCounts:
    """Try to reduce the number of packs in rounds. Each round cuts every pack at random into two parts, and then combines
    each part with the largest other part that fits.

    Args:
        strategy_counts: the packs to improve.
        max_length: tokens of a pack.
        depth: the maximum number of sequences per pack.
        target_packs: the search ends once there are at most this many packs, such as a lower bound.
        budget: the operation budget.
    """
    half = depth // 2
    if not strategy_counts or half == 0:
        return dict(strategy_counts)
    lengths, starts = flatten_packs(strategy_counts)
    patience = max(LEAST_STALLED, STALLED_SEQUENCES // max(len(lengths), FEWEST_SEQUENCES))
    stalled = rounds = 0
    while len(starts) - 1 > target_packs and stalled < patience and not budget.is_exhausted:
        before = len(starts)
        words = (draw_random_uint64(len(lengths), 0, "halves", rounds) >> np.uint64(1)).astype(np.int64)
        lengths, starts = _cut_and_recombine_all_packs(lengths, starts, words, max_length, half)
        budget.spend(OPERATIONS_PER_SEQUENCE * len(lengths) + OPERATIONS_PER_TOKEN * max_length)
        stalled = 0 if len(starts) < before else stalled + 1
        rounds += 1
    return count_strategies(lengths, starts)


def select_packs_with_room(strategy_counts: StrategyCounts, max_length: int, max_sequences: int) -> StrategyCounts:
    """Select packs with at most `max_sequences` sequences in total, so that a search among them stays fast. Prefer packs
    with many free tokens.

    Half of the sequences come from the packs with the most room, and the rest in proportion from all strategies.
    """
    sequences = sum(len(strategy) * count for strategy, count in strategy_counts.items())
    if sequences <= max_sequences:
        return dict(strategy_counts)
    chosen: StrategyCounts = {}
    remaining = max_sequences // 2
    for strategy in sorted(strategy_counts, key=lambda strategy: (sum(strategy), strategy)):
        count = min(strategy_counts[strategy], remaining // len(strategy))
        if sum(strategy) == max_length or count == 0:
            break
        chosen[strategy] = count
        remaining -= count * len(strategy)
    carried = 0.0
    for strategy, count in strategy_counts.items():
        carried += (count - chosen.get(strategy, 0)) * (max_sequences - max_sequences // 2) / sequences
        taken = min(int(carried), count - chosen.get(strategy, 0))
        carried -= taken
        add_packs(chosen, strategy, taken)
    return chosen


@kernel
def _cut_and_recombine_all_packs(
    lengths: IntArray, pack_starts: IntArray, random_integers: IntArray, max_length: int, max_half_size: int
) -> tuple[IntArray, IntArray]:
    """Cut every pack at random into two parts, and combine the parts again into as few packs as possible. Return the new
    packs as two arrays, like `flatten_packs`.

    The order in `lengths` is lost. `random_integers` are non-negative random integers, int64 [sequences]. A part contains at
    most `max_half_size` sequences.
    """
    result_lengths, result_starts = np.empty_like(lengths), np.zeros(2 * pack_starts.size, dtype=np.int64)
    bounds, tokens = np.empty((2 * pack_starts.size, 2), dtype=np.int64), np.zeros(2 * pack_starts.size, dtype=np.int64)
    packs = filled = parts = 0
    for pack in range(pack_starts.size - 1):
        first, end = pack_starts[pack], pack_starts[pack + 1]
        if end - first > 2 * max_half_size:  # a full pack of odd depth cannot be cut, so it stays as it is
            for index in range(first, end):
                result_lengths[filled] = lengths[index]
                filled += 1
            packs += 1
            result_starts[packs] = filled
            continue
        for index in range(end - 1, first, -1):
            other = first + random_integers[index] % (index - first + 1)
            lengths[index], lengths[other] = lengths[other], lengths[index]
        least, most = max(0, end - first - max_half_size), min(max_half_size, end - first)
        choice = random_integers[first] // 2
        cut = first + ((end - first + 1) // 2 if random_integers[first] % 2 else least + choice % (most - least + 1))
        for one, two in ((first, cut), (cut, end)):
            if two > one:
                bounds[parts, 0], bounds[parts, 1] = one, two
                for index in range(one, two):
                    tokens[parts] += lengths[index]
                parts += 1
    order = _counting_argsort(tokens[:parts], max_length)
    is_used = np.zeros(parts, dtype=np.bool_)
    fitting, fit_count, following = np.empty(parts, dtype=np.int64), 0, 0  # smaller parts that fit, largest last
    for index in range(parts - 1, -1, -1):
        if is_used[index]:
            continue
        room = max_length - tokens[order[index]]
        while following < index and tokens[order[following]] <= room:
            fitting[fit_count] = following
            fit_count += 1
            following += 1
        while fit_count > 0 and (is_used[fitting[fit_count - 1]] or fitting[fit_count - 1] >= index):
            fit_count -= 1
        mate = index
        if fit_count > 0:
            fit_count -= 1
            mate = fitting[fit_count]
        is_used[index] = is_used[mate] = True
        for chosen in (index, mate) if mate != index else (index, index):
            one, two = bounds[order[chosen]]
            for held in range(one, two):
                result_lengths[filled] = lengths[held]
                filled += 1
            if mate == index:
                break
        packs += 1
        result_starts[packs] = filled
    return result_lengths, result_starts[: packs + 1]


@kernel
def _counting_argsort(values: IntArray, max_value: int) -> IntArray:
    """Return the indices that sort `values` by a stable counting sort. The values must be integers from 0 to `max_value`."""
    positions = np.zeros(max_value + 2, dtype=np.int64)
    for value in values:
        positions[value + 1] += 1
    positions = np.cumsum(positions)
    order = np.empty(values.size, dtype=np.int64)
    for number, value in enumerate(values):
        order[positions[value]] = number
        positions[value] += 1
    return order
