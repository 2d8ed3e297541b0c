"""Long packs, with thousands of lengths: plan on a coarse grid, deal the sequences into its slots, swap what does not fit.

With thousands of lengths the linear program itself is the cost. So the lengths are split among some hundred bins, and that
problem is solved; its prices, interpolated, prove a bound. Its plan states which bins share a pack, and has as many slots as
there are sequences. The shortest sequence gets the shortest slot, and so on; among the slots of one bin, the fullest pack
gets the shortest sequence, so that errors cancel. What then sticks out of a pack is swapped against a sequence that is
shorter by just the excess, in a pack with this much room (the multi-way partitioning by differences of Karmarkar and Karp,
1982, with exchanges as a finish): that touches no limit of depth, and with thousands of lengths there are nearly always such
pairs. Where swaps end before all packs fit, an empty pack is opened, whose slots are swapped like sequences of length 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray, random_words
from gaudi_bert.common.compiled import kernel
from gaudi_bert.packing.heuristics import best_fit_into
from gaudi_bert.packing.strategies import (
    Strategy,
    StrategyCounts,
    WorkBudget,
    add_packs,
    count_strategies,
    fill_slots,
    flatten_packs,
)

# --- every constant of long packs, and its reason (figures: `benchmarks/packing.py --parts limits`)

MANY_LENGTHS = 2500  # with more different lengths the linear program of all of them is too slow: they go through a grid
FEW_LENGTHS = 600  # so few lengths are solved as they are, however long the packs; in between, a grid comes first
BINS = 512  # of a grid: its program takes a second, and its prices prove a bound within a pack or two
GRIDS = ((BINS, 0), (BINS, 1), (BINS, 4), (2 * BINS, 1))  # bins and how often the slack, until packs are near the bound
SLACK_SHARE, SLACK_PACKS = 3e-5, 0.3  # a sequence's slack: of the mean length, or of a pack for all of them; the larger
NEAR = 10_000  # within one pack in so many of the bound a plan is good enough to be matched or searched for the last pack
LAST_PACK_SHARE = 0.3  # of the work, to find out whether the last pack can be saved
MATCHED = 200_000  # of more sequences a part is matched, the packs with room first: a round takes a fiftieth of a second

MAX_ASSIGNED_SEQUENCES = 2_000_000  # more sequences would take gigabytes and minutes if each had a separate slot
THINNED = 500_000  # of more sequences so many are planned: what that wastes is a fiftieth of a thousandth of the packs
MOST_LENGTHS = 1 << 17  # with more different lengths so many sequences are planned: each costs a heuristic microseconds

MOST_EMPTY, LEAST_EMPTY = 32, 2  # empty slots of an empty and of a full pack: a sequence may move without a swap
SPARE_SHARE, LEAST_SPARE = 0.0002, 8  # empty packs that may be opened where swaps end
MOST_ROUNDS = 1000  # of swaps: a guard, they end earlier
PROBES, PROBES_OF_A_LENGTH = 3000, 32  # sequences of fitting length that are looked at for one swap
WIDEST = 200  # tokens by which such a swap may take more than the excess
ROOMY = 400  # packs with the most room that are looked at one by one
FAILURES = 100  # packs in a row that find no swap: the round ends
FEW_FITTED = 0.01  # after a round in which a smaller share lost its excess, excess is passed along among packs
STALLED = 3  # such rounds before an empty pack is opened
OPERATIONS_PER_ASSIGNED = 500  # for each sequence, to deal it into a slot and to read the packs afterwards
OPERATIONS_PER_PACK, OPERATIONS_PER_TRIAL = 20, 50_000  # of a round, for each pack and for each that is tried


class _SlotAssignment(NamedTuple):
    """Which sequence is in which slot; N sequences by rising length, P packs, slots in the order of their packs."""

    lengths: IntArray  # int64 [N]; 0 once it is given up
    pack: IntArray  # int64 [N], the pack of each sequence
    slot: IntArray  # int64 [N], the slot of each sequence
    sequence: IntArray  # int64 [N], the sequence in each slot
    first_slot: IntArray  # int64 [P + 1], where the slots of each pack begin
    first_sequence: IntArray  # int64 [L + 2], where the sequences of each length begin
    excess: IntArray  # int64 [P], tokens over the end of the pack; negative: room
    pointer: IntArray  # int64 [L + 2], the next sequence of each length to look at, from its first


def assign_to_slots(
    coarse: Mapping[Strategy, int], counts: IntArray, bins: int, depth: int, work: WorkBudget
) -> tuple[StrategyCounts, IntArray]:
    """Deal sequences one by one into the slots of a plan; returns the packs, and the sequences that do not fit, int64 [L].

    `coarse` are strategies of bins, of which `bins` fill a pack, with exactly as many slots as `counts` has sequences.
    """
    max_length = len(counts)
    spare = max(LEAST_SPARE, int(SPARE_SHARE * sum(coarse.values())))
    # As many bins of 0 as there is room for, and as depth allows; the empty packs come first.
    with_empty = {(0,) * min(depth, MOST_EMPTY): spare}
    for strategy, count in coarse.items():
        slots = min(depth - len(strategy), max(LEAST_EMPTY, MOST_EMPTY * (bins - sum(strategy)) // bins))
        add_packs(with_empty, (0,) * slots + strategy, count)
    slot_bins, first_slot = flatten_packs(with_empty)
    empty = len(slot_bins) - int(counts.sum())
    lengths = np.concatenate((np.zeros(empty, dtype=np.int64), np.repeat(np.arange(1, max_length + 1), counts)))
    assignment = _SlotAssignment(
        lengths=lengths,
        pack=np.zeros(len(lengths), dtype=np.int64),
        slot=np.zeros(len(lengths), dtype=np.int64),
        sequence=np.zeros(len(lengths), dtype=np.int64),
        first_slot=first_slot,
        first_sequence=empty + np.concatenate(([0, 0], np.cumsum(counts))),
        excess=np.full(len(first_slot) - 1, -max_length),
        pointer=np.zeros(max_length + 2, dtype=np.int64),
    )
    work.spend(OPERATIONS_PER_ASSIGNED * len(lengths))
    _assign_all(assignment, slot_bins, np.repeat(np.arange(len(first_slot) - 1), np.diff(first_slot)), max_length / bins)
    _swap_until_all_fit(assignment, spare, work)
    given_up = _remove_excess_sequences(assignment)
    packs = count_strategies(assignment.lengths[assignment.sequence], assignment.first_slot)
    return packs, np.bincount(given_up, minlength=max_length + 1)[1:].astype(np.int64)


def _assign_all(assignment: _SlotAssignment, bins: IntArray, packs: IntArray, bin_tokens: float) -> None:
    """Give every slot its sequence, the largest bins first; equal bins of one pack one after the other."""
    number = len(bins)
    position = np.arange(number) - assignment.first_slot[packs]
    same = np.concatenate(([False], (bins[1:] == bins[:-1]) & (position[1:] > 0)))
    copy = np.arange(number) - np.maximum.accumulate(np.where(same, 0, np.arange(number)))
    slots = np.lexsort((copy, bins))
    new = np.diff(bins[slots], prepend=-1) != 0
    group = np.cumsum(new | (np.diff(copy[slots], prepend=-1) != 0))
    # The sequences of a bin are drawn for its groups at random, and lie by length in each.
    shuffled = np.lexsort((random_words(number, 0, "slots"), np.cumsum(new)))
    sequences = shuffled[np.lexsort((shuffled, group))]
    ends = np.append(np.flatnonzero(np.diff(group)) + 1, number)
    _assign_groups(assignment, packs, bin_tokens * bins, slots, sequences, ends)


@kernel
def _assign_groups(
    assignment: _SlotAssignment, packs: IntArray, planned: FloatArray, slots: IntArray, sequences: IntArray, ends: IntArray
) -> None:
    """Slots of one bin and sequences for them lie between two `ends`; the fullest pack gets the shortest."""
    error = assignment.excess.astype(np.float64)  # what the excess will be if what is to come is as planned
    for slot in range(packs.size):
        error[packs[slot]] += planned[slot]
    for group in range(ends.size - 1, -1, -1):
        start = ends[group - 1] if group > 0 else 0
        members = slots[start : ends[group]]
        order = np.argsort(-error[packs[members]], kind="mergesort")
        for position in range(members.size):
            slot, sequence = members[order[position]], sequences[start + position]
            pack = packs[slot]
            assignment.sequence[slot], assignment.slot[sequence], assignment.pack[sequence] = sequence, slot, pack
            assignment.excess[pack] += assignment.lengths[sequence]
            error[pack] += assignment.lengths[sequence] - planned[slot]


def _swap_until_all_fit(assignment: _SlotAssignment, spare: int, work: WorkBudget) -> None:
    """Swap until no pack has an excess, or nothing helps. The first `spare` packs are empty, and closed at first."""
    room = assignment.excess[:spare].copy()
    assignment.excess[:spare] = 0
    opened = stalled = 0
    for _ in range(MOST_ROUNDS):
        over = np.flatnonzero(assignment.excess > 0)
        if len(over) == 0 or work.exhausted:
            break
        over = over[np.argsort(-_shortest_above_excess(assignment, over), kind="stable")]
        roomy = np.argpartition(assignment.excess, min(ROOMY, len(assignment.excess) - 1))[:ROOMY]
        roomy = roomy[np.argsort(assignment.excess[roomy], kind="stable")]
        tried, fitted = _swap_excess_away(assignment, over, roomy)
        work.spend(OPERATIONS_PER_PACK * len(assignment.excess) + OPERATIONS_PER_TRIAL * tried)
        if fitted > FEW_FITTED * tried:
            continue
        stalled += 1
        if stalled % STALLED:
            _move_excess_elsewhere(assignment, over)
        elif opened < spare:
            assignment.excess[opened] = room[opened]
            opened += 1
        else:
            break


@kernel
def _shortest_above_excess(assignment: _SlotAssignment, packs: IntArray) -> IntArray:
    """The shortest sequence of each pack that is longer than its excess, int64 [packs]: longer ones are given up first."""
    result = np.full(packs.size, assignment.first_sequence.size)
    for number, pack in enumerate(packs):
        for slot in range(assignment.first_slot[pack], assignment.first_slot[pack + 1]):
            length = assignment.lengths[assignment.sequence[slot]]
            if assignment.excess[pack] <= length < result[number]:
                result[number] = length
    return result


@kernel
def _swap_excess_away(assignment: _SlotAssignment, packs: IntArray, roomy: IntArray) -> tuple[int, int]:
    """Try to take away the excess of each of `packs`; returns how many were tried and how many lost it."""
    tried = fitted = failures = 0
    for pack in packs:
        while assignment.excess[pack] > 0 and (_swap_by_length(assignment, pack) or _swap_by_room(assignment, pack, roomy)):
            pass
        tried += 1
        failures += 1
        if assignment.excess[pack] <= 0:
            if assignment.excess[pack] < -WIDEST:  # it gave up a sequence, and may take one that is a little shorter
                roomy[roomy.size - 1 - fitted % (1 + roomy.size // 2)] = pack
            fitted += 1
            failures = 0
        if failures == FAILURES:
            break
    return tried, fitted


@kernel
def _move_excess_elsewhere(assignment: _SlotAssignment, packs: IntArray) -> None:
    """Swap the excess of each of `packs` into another that has none, where it may find room in a later round."""
    for pack in packs:
        if assignment.excess[pack] > 0:
            _try_swap(assignment, pack, assignment.excess[pack], assignment.excess[pack])


@kernel
def _swap_by_length(assignment: _SlotAssignment, pack: int) -> bool:
    """Swap away the excess of a pack, against a sequence that is just as much shorter, or a little more."""
    probes = 0
    for taken in range(assignment.excess[pack], assignment.excess[pack] + WIDEST):
        looked_at = _try_swap(assignment, pack, taken, 0)
        if looked_at < 0:
            return True
        probes += looked_at
        if probes > PROBES:
            break
    return False


@kernel
def _try_swap(assignment: _SlotAssignment, pack: int, taken: int, allowed: int) -> int:
    """Swap against a sequence shorter by `taken`, whose pack then exceeds by at most `allowed`: -1, or the number seen."""
    probes = 0
    for slot in range(assignment.first_slot[pack], assignment.first_slot[pack + 1]):
        sequence = assignment.sequence[slot]
        shorter = assignment.lengths[sequence] - taken
        if shorter < 1:
            continue
        first = assignment.first_sequence[shorter]
        equal = assignment.first_sequence[shorter + 1] - first
        for _ in range(min(equal, PROBES_OF_A_LENGTH)):
            probes += 1
            assignment.pointer[shorter] = (assignment.pointer[shorter] + 1) % equal
            other = first + assignment.pointer[shorter]
            if (
                assignment.excess[assignment.pack[other]] + taken <= allowed
                and assignment.lengths[other] == shorter
                and assignment.pack[other] != pack
            ):
                _exchange_sequences(assignment, sequence, other, taken)
                return -1
    return probes


@kernel
def _swap_by_room(assignment: _SlotAssignment, pack: int, roomy: IntArray) -> bool:
    """Swap away the excess of a pack, or as much of it as is possible, with one of the packs that have the most room."""
    excess = assignment.excess[pack]
    best, longer, shorter = 0, 0, 0
    for other in roomy:
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
    """Two sequences change positions."""
    one, two = assignment.pack[longer], assignment.pack[shorter]
    assignment.excess[one] -= difference
    assignment.excess[two] += difference
    assignment.pack[longer], assignment.pack[shorter] = two, one
    slot = assignment.slot[longer]
    assignment.slot[longer] = assignment.slot[shorter]
    assignment.slot[shorter] = slot
    assignment.sequence[assignment.slot[longer]], assignment.sequence[slot] = longer, shorter


def _remove_excess_sequences(assignment: _SlotAssignment) -> IntArray:
    """Take out of the packs what they still hold too much; returns the lengths, int64."""
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


# --- plans on coarse grids


def split_counts_into_bins(counts: IntArray, bins: int, slack: float = 0.0) -> IntArray:
    """Sequences in each bin, int64 [bins], where a length between two bins is split among both.

    Bin c stands for c * L / bins tokens. Number and tokens of all sequences stay as they are, to within one bin, but what is
    shorter than a bin lies in the first. With `slack` each sequence counts as so many tokens more.
    """
    max_length = len(counts)
    result = [0] * (bins + 2)
    carried = 0.0
    for length in (np.flatnonzero(counts) + 1).tolist():
        count, (lower, above) = int(counts[length - 1]), divmod(length * bins, max_length)
        if lower == 0:
            result[1] += count
            continue
        share = count * (above + slack * bins) / max_length + carried
        raised = min(count, max(0, round(share)))
        carried = share - raised
        result[lower] += count - raised
        result[lower + 1] += raised
    result[bins] += result[bins + 1]  # what was carried may raise the longest sequences
    return np.array(result[1 : bins + 1], dtype=np.int64)


def interpolate_prices(prices: IntArray, max_length: int) -> IntArray:
    """Prices of the lengths 1 .. L from those of equal bins, int64 [bins] to int64 [L], never falling with length."""
    bins = len(prices)
    positions = np.arange(1, max_length + 1) * bins / max_length
    fine = np.interp(positions, np.arange(bins + 1), np.concatenate(([0.0], prices)))
    result: IntArray = np.maximum.accumulate(np.floor(fine)).astype(np.int64)
    return result


def pack_subsample(
    counts: IntArray, depth: int, pack: Callable[[IntArray], StrategyCounts], planned: int = THINNED
) -> StrategyCounts:
    """Pack more sequences than can be dealt: `pack` packs every n-th of them by length, each of its packs is used n times.

    A slot then takes its sequence and the n - 1 next shorter ones; the fewer than n longest are packed by best fit.
    """
    every = -(-int(counts.sum()) // planned)
    longest = int(counts.sum()) % every
    rest = np.diff(np.minimum(np.cumsum(counts[::-1]), longest), prepend=0)[::-1]
    whole = np.cumsum(counts - rest) // every
    slots = {strategy: every * count for strategy, count in pack(np.diff(whole, prepend=0)).items()}
    return best_fit_into(fill_slots(slots, counts - rest), rest, depth)


# --- fewer packs by cutting all of them in two and matching the parts again
#
# Every pack is cut, at random, into two parts of at most half the depth each. Then the parts are matched, the largest first,
# each with the largest part that still fits, which is a best matching: if x has another partner w than the largest one that
# fits, y, then x and y may change partners, because what fits y fits w. So no round needs more packs than the one before it,
# and room gathers with the smallest parts, until two that stood alone share a pack. This ends where swaps do not: with
# thousands of packs that have to be exactly full.

STALLED_SEQUENCES, LEAST_STALLED = 10_000_000, 25  # given up when rounds over so many, and so many rounds, saved no pack
FEWEST_SEQUENCES = 1000  # a round over fewer takes as long
OPERATIONS_PER_SEQUENCE, OPERATIONS_PER_TOKEN = 100, 5  # of a round; by the tokens of a pack parts are sorted


def rematch_halves(
    strategy_counts: StrategyCounts, max_length: int, depth: int, enough: int, work: WorkBudget
) -> StrategyCounts:
    """Repack the sequences in fewer packs, by cutting packs in two and matching the parts again."""
    half = depth // 2
    if not strategy_counts or half == 0:
        return dict(strategy_counts)
    lengths, starts = flatten_packs(strategy_counts)
    patience = max(LEAST_STALLED, STALLED_SEQUENCES // max(len(lengths), FEWEST_SEQUENCES))
    stalled = rounds = 0
    while len(starts) - 1 > enough and stalled < patience and not work.exhausted:
        before = len(starts)
        words = (random_words(len(lengths), 0, "halves", rounds) >> np.uint64(1)).astype(np.int64)
        lengths, starts = _rematch_once(lengths, starts, words, max_length, half)
        work.spend(OPERATIONS_PER_SEQUENCE * len(lengths) + OPERATIONS_PER_TOKEN * max_length)
        stalled = 0 if len(starts) < before else stalled + 1
        rounds += 1
    return count_strategies(lengths, starts)


def select_packs_with_room(strategy_counts: StrategyCounts, max_length: int, most: int) -> StrategyCounts:
    """Packs of at most `most` sequences: half of them the roomiest not full, then an equal share of each strategy."""
    sequences = sum(len(strategy) * count for strategy, count in strategy_counts.items())
    if sequences <= most:
        return dict(strategy_counts)
    chosen: StrategyCounts = {}
    remaining = most // 2
    for strategy in sorted(strategy_counts, key=lambda strategy: (sum(strategy), strategy)):
        count = min(strategy_counts[strategy], remaining // len(strategy))
        if sum(strategy) == max_length or count == 0:
            break
        chosen[strategy] = count
        remaining -= count * len(strategy)
    carried = 0.0
    for strategy, count in strategy_counts.items():
        carried += (count - chosen.get(strategy, 0)) * (most - most // 2) / sequences
        taken = min(int(carried), count - chosen.get(strategy, 0))
        carried -= taken
        add_packs(chosen, strategy, taken)
    return chosen


@kernel
def _rematch_once(
    lengths: IntArray, starts: IntArray, words: IntArray, max_length: int, half: int
) -> tuple[IntArray, IntArray]:
    """One round: the packs as `flatten_packs` has them, from those before; the order in `lengths` is lost.

    `words`, int64 [sequences], are random and not negative; a part has at most `half` sequences.
    """
    result_lengths, result_starts = np.empty_like(lengths), np.zeros(2 * starts.size, dtype=np.int64)
    bounds, tokens = np.empty((2 * starts.size, 2), dtype=np.int64), np.zeros(2 * starts.size, dtype=np.int64)
    packs = filled = parts = 0
    for pack in range(starts.size - 1):
        first, end = starts[pack], starts[pack + 1]
        if end - first > 2 * half:  # of an odd depth, and full: it stays
            for index in range(first, end):
                result_lengths[filled] = lengths[index]
                filled += 1
            packs += 1
            result_starts[packs] = filled
            continue
        for index in range(end - 1, first, -1):
            other = first + words[index] % (index - first + 1)
            lengths[index], lengths[other] = lengths[other], lengths[index]
        least, most = max(0, end - first - half), min(half, end - first)
        choice = words[first] // 2
        cut = first + ((end - first + 1) // 2 if words[first] % 2 else least + choice % (most - least + 1))
        for one, two in ((first, cut), (cut, end)):
            if two > one:
                bounds[parts, 0], bounds[parts, 1] = one, two
                for index in range(one, two):
                    tokens[parts] += lengths[index]
                parts += 1
    order = _counting_argsort(tokens[:parts], max_length)
    is_used = np.zeros(parts, dtype=np.bool_)
    fitting, fit_count, following = np.empty(parts, dtype=np.int64), 0, 0  # smaller parts that fit, the largest at the end
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
def _counting_argsort(values: IntArray, most: int) -> IntArray:
    """The order that sorts `values` of 0 .. `most`, equal ones as they come, by counting them."""
    positions = np.zeros(most + 2, dtype=np.int64)
    for value in values:
        positions[value + 1] += 1
    positions = np.cumsum(positions)
    order = np.empty(values.size, dtype=np.int64)
    for number, value in enumerate(values):
        order[positions[value]] = number
        positions[value] += 1
    return order
