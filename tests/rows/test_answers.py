"""Rows are planned into windows, laid out as packs, and answered: every sequence once, and what tasks answer spelt out."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.packs import BatchShape, Packs, lay_out_packs
from gaudi_bert.rows.types import IGNORED, NO_WORD, QuestionRow, RowPosition, Sequences, TaggedRow, TextRow
from gaudi_bert.rows.window_plan import GRID, LEAST_GAIN, MOST_LENGTHS, WindowPlan, best_row_lengths, plan_window, row_cost
from gaudi_bert.tasks.kinds.question_answering import squad_scores
from gaudi_bert.tasks.kinds.task import Draw, Vocabulary, task_named
from tests.builders.agree import agree
from tests.builders.properties import examples

ROWS = [TextRow(RowPosition(number), "text") for number in (1, 2, 3)]


def texts(target=None) -> Sequences:
    return Sequences(np.arange(3), np.array([0, 2, 4, 6]), np.full(6, 5, np.int32), np.zeros(6, np.int8), target=target)


def test_classification() -> None:
    task = task_named("classification")(TaskSettings(), ("no", "yes"))
    logits = np.array([[0.0, 0.0], [np.log(3.0), 0.0], [-100.0, 100.0]], np.float32)
    answers = list(task.answers(logits, texts(), ROWS))
    assert [answer["label"] for answer in answers] == ["no", "no", "yes"]
    agree(answers[1]["probabilities"], {"no": 0.75, "yes": 0.25})
    found = task.metrics(logits, texts(np.array([0, 1, 1], np.int32)), ROWS)
    agree(found, {"accuracy": 2 / 3, "f1_macro": 2 / 3, "matthews_correlation": 0.5})


def test_the_majority_baseline_answers_what_was_most_frequent_in_training() -> None:
    task = task_named("classification")(TaskSettings(), ("no", "yes"))
    learnt, measured = texts(np.array([1, 1, 0], np.int32)), texts(np.array([0, 1, 0], np.int32))
    agree(task.baseline(learnt, measured), {"accuracy": 1 / 3})


def test_multi_label() -> None:
    task = task_named("multi-label")(TaskSettings(), ("a", "b", "c"))
    logits = np.array([[1.0, -1.0, 2.0], [-1.0, -1.0, -1.0], [-1.0, 5.0, -1.0]], np.float32)
    assert [answer["labels"] for answer in task.answers(logits, texts(), ROWS)] == [["a", "c"], [], ["b"]]
    target = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0]], np.float32)
    found = task.metrics(logits, texts(target), ROWS)
    agree(found, {"f1_micro": 6 / 7, "f1_macro": (2 / 3 + 1 + 1) / 3, "accuracy": 2 / 3})


def test_regression() -> None:
    task = task_named("regression")(TaskSettings())
    logits = np.array([[1.0], [2.0], [4.0]], np.float32)
    assert list(task.answers(logits, texts(), ROWS)) == [{"value": 1.0}, {"value": 2.0}, {"value": 4.0}]
    found = task.metrics(logits, texts(np.array([0.0, 1.0, 3.0], np.float32)), ROWS)
    agree(found, {"pearson": 1.0, "spearman": 1.0, "mean_squared_error": 1.0})
    constant = task.metrics(np.ones((3, 1), np.float32), texts(np.array([0.0, 1.0, 3.0], np.float32)), ROWS)
    assert constant["pearson"] == constant["spearman"] == 0.0


def test_tags_are_entities_with_their_characters() -> None:
    labels = ("O", "B-x", "I-x", "B-y")
    task = task_named("token-classification")(TaskSettings(), labels)
    rows = [
        TaggedRow(RowPosition(1), ("New", "York", "is", "x"), ("B-x", "I-x", "O", "B-y")),
        TaggedRow(RowPosition(2), ("Rome",), ("B-y",)),
    ]
    words = np.array([NO_WORD, 0, NO_WORD, 1, 2, 3, NO_WORD, NO_WORD, 0, NO_WORD], np.int32)
    target = np.array([IGNORED, 1, IGNORED, 2, 0, 3, IGNORED, IGNORED, 3, IGNORED], np.int32)
    logits = np.zeros((10, 4), np.float32)
    for token, tag in ((1, 1), (3, 2), (4, 0), (5, 1), (8, 3)):
        logits[token, tag] = 50.0
    sequences = Sequences(
        np.array([0, 1]), np.array([0, 7, 10]), np.full(10, 5, np.int32), np.zeros(10, np.int8), words=words, target=target
    )
    one = [{"start": 0, "end": 8, "tag": "x", "score": 1.0}, {"start": 12, "end": 13, "tag": "x", "score": 1.0}]
    other = [{"start": 0, "end": 4, "tag": "y", "score": 1.0}]
    agree(list(task.answers(logits, sequences, rows)), [{"tags": one}, {"tags": other}])
    found = task.metrics(logits, sequences, rows)
    agree(found, {"f1": 2 / 3, "precision": 2 / 3, "recall": 2 / 3, "accuracy": 0.8})


def tagged(tags: tuple[str, ...], guessed: tuple[str, ...], labels: tuple[str, ...]):
    """One row of words of one letter, a token each, with the model's outputs for `guessed`."""
    row = TaggedRow(1, tuple("abcdefgh"[: len(tags)]), tags)
    target, words = np.array([labels.index(tag) for tag in tags], np.int32), np.arange(len(tags), dtype=np.int32)
    logits = 50.0 * np.eye(len(labels), dtype=np.float32)[[labels.index(tag) for tag in guessed]]
    ids = np.full(len(tags), 5, np.int32)
    bounds = np.array([0, len(tags)])
    return logits, Sequences(np.array([0]), bounds, ids, np.zeros(len(tags), np.int8), words=words, target=target), [row]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("labels", "right", "guessed", "spans", "expected"),
    [
        # no prefix: a span for each word, and no entities in the metrics
        ("O P Q", "O P Q P", "O P P P", [(2, 3, "P"), (4, 5, "P"), (6, 7, "P")], {"accuracy": 3 / 4, "f1_macro": 1.8 / 3}),
        ("B N V", "B N V", "B N V", [(0, 1, "B"), (2, 3, "N"), (4, 5, "V")], {"accuracy": 1.0, "f1_macro": 1.0}),
        ("O B-x I-x", "B-x I-x O B-x", "B-x I-x O O", [(0, 3, "x")], {"f1": 2 / 3, "precision": 1.0, "recall": 0.5}),
        ("O B-x I-x E-x S-x", "B-x E-x S-x O", "B-x E-x S-x O", [(0, 3, "x"), (4, 5, "x")], {"f1": 1.0}),
        ("O B-x I-x L-x U-x", "B-x L-x U-x U-x", "B-x L-x U-x O", [(0, 3, "x"), (4, 5, "x")], {"f1": 0.8, "recall": 2 / 3}),
        ("O B I", "B I B O", "B I B O", [(0, 3, "_"), (4, 5, "_")], {"f1": 1.0, "accuracy": 1.0}),
    ],
)
def test_tags_of_every_scheme(labels, right, guessed, spans, expected) -> None:
    names = tuple(labels.split())
    task = task_named("token-classification")(TaskSettings(), names)
    given = tagged(tuple(right.split()), tuple(guessed.split()), names)
    found = task.metrics(*given)
    agree({name: found[name] for name in expected}, expected)
    assert {"loss", *found} == set(task.metric_names)
    assert (task.note(()) is None) == (task.best_metric == "f1")
    (answer,) = task.answers(*given)
    assert [(tag["start"], tag["end"], tag["tag"]) for tag in answer["tags"]] == spans


def test_equal_evaluations_are_ordered_by_the_loss() -> None:
    task = task_named("classification")(TaskSettings(), ("no", "yes"))
    worst_to_best = [{"accuracy": 0.5, "loss": 0.1}, {"accuracy": 0.6, "loss": 0.9}, {"accuracy": 0.6, "loss": 0.8}]
    ranks = [task.rank(metrics, "accuracy") for metrics in worst_to_best]
    assert ranks == sorted(set(ranks))
    assert task.rank(worst_to_best[0], "loss") > task.rank(worst_to_best[2], "loss")


def question(threshold: float | None, n_best: int = 3):
    """Two windows of one row: `ab cd` and `cd ef`; [CLS], the question, [SEP], then two words."""
    settings = TaskSettings(null_score_threshold=threshold, n_best=n_best, max_answer_tokens=2)
    task = task_named("question-answering")(settings)
    outside = [-1, -1]
    characters = np.array(
        [outside, outside, outside, [0, 2], [3, 5], outside, *[outside] * 3, [3, 5], [6, 8], outside], np.int32
    )
    logits = np.zeros((12, 2), np.float32)
    logits[1] = 99.0  # the question is no answer
    logits[3, 0], logits[4, 1], logits[10] = 4.0, 5.0, (3.0, 3.0)
    logits[0], logits[6] = (1.0, 1.0), (20.0, 20.0)  # the least of the windows counts: 2
    sequences = Sequences(
        np.zeros(2, np.int64), np.array([0, 6, 12]), np.full(12, 5, np.int32), np.zeros(12, np.int8), characters
    )
    return task, logits, sequences, [QuestionRow(RowPosition(1), "q", "what?", "ab cd ef", (("ab cd", 0),))]


def test_the_best_answers_of_all_windows() -> None:
    task, logits, sequences, rows = question(None)
    (answer,) = task.answers(logits, sequences, rows)
    assert [(each["text"], each["start"], each["end"]) for each in answer["answers"]] == [
        ("ab cd", 0, 5),
        ("ef", 6, 8),
        ("cd", 3, 5),
    ]
    scores = [each["score"] for each in answer["answers"]]
    assert scores == sorted(scores, reverse=True)
    agree(scores[1] / scores[0], np.exp(-3.0))
    assert task.metrics(logits, sequences, rows) == {"exact_match": 100.0, "f1": 100.0}


@pytest.mark.parametrize(("threshold", "best"), [(0.0, "ab cd"), (-8.0, "")])
def test_no_answer_is_an_answer_where_the_data_has_such(threshold: float, best: str) -> None:
    task, logits, sequences, rows = question(threshold, n_best=20)
    (answer,) = task.answers(logits, sequences, rows)
    assert answer["answers"][0]["text"] == best
    agree(sum(each["score"] for each in answer["answers"]), 1.0)
    assert sorted(each["text"] for each in answer["answers"]).count("") == 1


def test_squad_compares_as_squad_does() -> None:
    found = squad_scores(["The cat!", "", "x y", "left"], [["cat"], [], ["y z", "q"], []])
    agree(found, {"exact_match": 50.0, "f1": 100 * (1 + 1 + 0.5 + 0) / 4})


def test_masks_are_drawn_anew_each_epoch_and_do_not_know_their_pack() -> None:
    task = task_named("masked-language-modelling")(TaskSettings(), (), Vocabulary(50, (0, 2, 3), 4))
    lengths = [9, 30, 3, 2, 17]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.random.default_rng(1).integers(5, 50, offsets[-1]).astype(np.int32)
    ids[offsets[:-1]], ids[offsets[1:] - 1] = 2, 3
    sequences = Sequences(np.arange(5), offsets, ids, np.zeros(len(ids), np.int8))

    def masked(packs: Packs, depth: int, epoch: int) -> dict[int, list]:
        placed = lay_out_packs(sequences, packs, np.arange(len(packs)), BatchShape(len(packs), 64, depth))
        features = task.target_features(sequences, placed, Draw(1, epoch))
        found: dict[int, list] = {number: [] for number in range(5)}
        for pack, (positions, targets, weights) in enumerate(
            zip(features["masked_positions"], features["targets"], features["target_weights"], strict=True)
        ):
            for position, target in zip(positions[weights > 0], targets[weights > 0], strict=True):
                inside = (placed.packs == pack) & (placed.starts <= position) & (position < placed.starts + placed.lengths)
                here = int(np.flatnonzero(inside)[0])
                within = int(position - placed.starts[here])
                number = int(placed.sequences[here])
                assert ids[offsets[number] + within] == target
                found[number].append((within, int(features["input_ids"][pack, position])))
        return found

    alone, together = Packs(np.arange(5), np.arange(6)), Packs(np.array([4, 1, 0, 3, 2]), np.array([0, 3, 5]))
    first = masked(alone, 1, 0)
    assert masked(together, 3, 0) == first
    assert [len(first[number]) for number in range(5)] == [1, 4, 1, 0, 2]
    assert masked(alone, 1, 1) != first


# --- packs as dense arrays: what lies where, and what the model says brought home

SEQUENCES = Sequences(
    row=np.arange(4),
    offsets=np.array([0, 2, 5, 6, 9]),
    input_ids=np.array([11, 12, 21, 22, 23, 31, 41, 42, 43], np.int32),
    segment_ids=np.array([0, 1, 0, 0, 1, 0, 0, 1, 1], np.int8),
)
PACKS = Packs(np.array([3, 0, 2, 1]), np.array([0, 2, 4]))


def test_a_batch_spelt_out() -> None:
    placed = lay_out_packs(SEQUENCES, PACKS, np.array([1, 0]), BatchShape(3, 7, 2))
    found = {name: values.tolist() for name, values in placed.features(SEQUENCES).items()}
    assert found == {
        "input_ids": [[31, 21, 22, 23, 0, 0, 0], [41, 42, 43, 11, 12, 0, 0], [0] * 7],
        "input_mask": [[1, 2, 2, 2, 0, 0, 0], [1, 1, 1, 2, 2, 0, 0], [0] * 7],
        "segment_ids": [[0, 0, 0, 1, 0, 0, 0], [0, 1, 1, 0, 1, 0, 0], [0] * 7],
        "positions": [[0, 0, 1, 2, 0, 0, 0], [0, 1, 2, 0, 1, 0, 0], [0] * 7],
        "sequence_positions": [[0, 1], [0, 3], [0, 0]],
        "last_positions": [[0, 3], [2, 4], [0, 0]],
        "sequence_weights": [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]],
    }


def test_what_is_said_of_a_sequence_or_a_token_goes_home() -> None:
    placed = lay_out_packs(SEQUENCES, PACKS, np.array([1, 0]), BatchShape(3, 7, 2))
    of_sequences = np.array([[[2.0], [1.0]], [[3.0], [0.0]], [[-1.0], [-1.0]]])
    out = np.full((4, 1), np.nan)
    placed.scatter_sequences(of_sequences, out)
    assert out[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    tokens = np.full((9, 1), np.nan)
    placed.scatter_tokens(placed.features(SEQUENCES)["input_ids"][:, :, np.newaxis].astype(np.float64), tokens)
    assert tokens[:, 0].tolist() == SEQUENCES.input_ids.tolist()


def test_no_packs_are_an_empty_batch() -> None:
    placed = lay_out_packs(SEQUENCES, PACKS, np.zeros(0, np.int64), BatchShape(2, 7, 3))
    assert all(not values.any() for values in placed.features(SEQUENCES).values())


# --- plans of windows: every sequence once, in a row that holds it; cheaper than unpacked, or unpacked


def check(plan: WindowPlan, lengths: np.ndarray) -> None:
    members = np.concatenate([part.packs.members for part in plan.parts])
    assert sorted(members.tolist()) == list(range(len(lengths)))
    for part in plan.parts:
        sizes = np.diff(part.packs.starts)
        assert sizes.min() >= 1
        assert sizes.max() <= part.depth
        tokens = np.add.reduceat(lengths[part.packs.members], part.packs.starts[:-1])
        assert tokens.max() <= part.length
    assert plan.tokens == lengths.sum()
    assert plan.slots == sum(len(part.packs) * part.length for part in plan.parts)


def cost(plan: WindowPlan) -> float:
    return sum(len(part.packs) * row_cost(part.length, 384) for part in plan.parts)


@examples(60)
@given(
    st.lists(st.one_of(st.integers(3, 40), st.integers(3, 512)), min_size=1, max_size=200), st.sampled_from([None, 512, 517])
)
def test_every_sequence_is_read_once(lengths: list[int], one_length: int | None) -> None:
    array = np.array(lengths, np.int64)
    plan = plan_window(array, hidden_size=384, one_length=one_length)
    check(plan, array)
    alone = plan_window(array, hidden_size=384, packed=False, one_length=one_length)
    check(alone, array)
    assert (len(alone.parts), alone.gain, alone.parts[0].depth) == (1, 1.0, 1)
    assert cost(plan) <= cost(alone) * (1 + 1e-12)
    assert plan.gain == 1.0 or cost(plan) * LEAST_GAIN <= cost(alone) * (1 + 1e-12)
    if one_length is not None:
        assert {part.length for part in plan.parts} == {one_length}
    for packed in (True, False):  # a model of as many positions as the longest sequence has
        tight = plan_window(array, hidden_size=384, packed=packed, longest_row=max(lengths))
        check(tight, array)
        assert max(part.length for part in tight.parts) <= max(lengths)


def test_short_rows_are_packed_with_next_to_no_padding() -> None:
    lengths = np.random.default_rng(1).integers(5, 40, 4001)
    plan = plan_window(lengths, hidden_size=384)
    assert plan.padding < 0.02
    assert plan.gain > 1.5


def test_a_few_long_rows_do_not_lengthen_all() -> None:
    lengths = np.concatenate([np.full(3000, 17), np.full(7, 490)])
    plan = plan_window(lengths, hidden_size=384)
    check(plan, lengths)
    assert {part.length for part in plan.parts} == {64, 496} or {part.length for part in plan.parts} == {128, 496}


def test_long_rows_stay_alone_in_a_few_lengths() -> None:
    lengths = np.random.default_rng(1).integers(384, 513, 512)
    plan = plan_window(lengths, hidden_size=384)
    check(plan, lengths)
    assert (plan.gain, [(part.length, part.depth) for part in plan.parts]) == (1.0, [(n, 1) for n in (416, 448, 480, 512)])
    assert plan_window(lengths, hidden_size=384, packed=False).slots == 512 * 512


def test_rows_are_no_longer_than_needed() -> None:
    assert plan_window(np.array([290, 301]), hidden_size=384).parts[0].length == 304


# --- the lengths of rows that hold one sequence each, beside all others that could be chosen


def length_cost(length: int) -> float:
    return row_cost(length, 128)


def cost_of(lengths: list[int], rows: list[int]) -> float:
    return sum(length_cost(min(row for row in rows if row >= length)) for length in lengths)


@examples(60)
@given(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 269)), min_size=1, max_size=60), st.integers(0, 20))
def test_no_others_cost_less(lengths: list[int], beyond: int) -> None:
    longest = max(lengths) + beyond
    rows, total = best_row_lengths(np.bincount(lengths)[1:], longest, length_cost)
    assert rows == sorted(set(rows))
    assert max(lengths) <= rows[-1] <= longest
    assert len(rows) <= MOST_LENGTHS
    agree(total, cost_of(lengths, rows), 1e-12)
    grid = range(GRID, longest, GRID)
    others = [[*some, longest] for count in range(MOST_LENGTHS) for some in combinations(grid, count)]
    assert total <= min(cost_of(lengths, other) for other in others) * (1 + 1e-12)
