"""Every head of a task, and packs of random sequences with its targets, as the features of a batch."""

from __future__ import annotations

import numpy as np

from gaudi_bert.model.heads import TaskHead

TEXTS = TaskHead("classification", 3)
HEADS = (
    *(TEXTS, TaskHead("multi-label", 3), TaskHead("regression", 1), TaskHead("reranking", 1)),
    *(TaskHead("token-classification", 4),),
    *(TaskHead("question-answering", 2), TaskHead("masked-language-modelling"), TaskHead("causal-language-modelling")),
)
LENGTHS = [[11, 5, 13], [17, 9], [31]]
LENGTH = 40


def packs_of(head: TaskHead, vocabulary: int) -> list[list[dict[str, np.ndarray]]]:
    """Sequences, pack by pack, each with its targets."""
    random = np.random.default_rng(5)
    packs = []
    for lengths in LENGTHS:
        pack = []
        for length in lengths:
            ids = random.integers(5, vocabulary, length)
            most = 2 if head.kind in ("multi-label", "reranking") else 3
            of_text = random.integers(0, most, 3 if head.kind == "multi-label" else None)
            spans = np.sort(random.integers(0, length, 2))
            of_tokens = random.integers(0, head.width or vocabulary, length)
            pack.append({"ids": ids, "text": of_text, "span": spans, "tokens": of_tokens})
        packs.append(pack)
    return packs


def batch_of(packs: list[list[dict[str, np.ndarray]]], head: TaskHead) -> dict[str, np.ndarray]:
    """The features of packs; every second token of a sequence is masked, or has a tag."""
    depth, slots = max(map(len, packs)), 20
    rows = {
        name: np.zeros((len(packs), LENGTH), np.int32) for name in ("input_ids", "input_mask", "segment_ids", "positions")
    }
    starts, lasts = np.zeros((len(packs), depth), np.int32), np.zeros((len(packs), depth), np.int32)
    real = np.zeros((len(packs), depth), np.float32)
    along, along_weights = np.zeros((len(packs), LENGTH), np.int32), np.zeros((len(packs), LENGTH), np.float32)
    masked, words, used = (np.zeros((len(packs), slots), kind) for kind in (np.int32, np.int32, np.float32))
    texts = np.zeros((len(packs), depth, 3) if head.kind == "multi-label" else (len(packs), depth), np.float32)
    spans = np.zeros((len(packs), depth, 2), np.int32)
    for p, pack in enumerate(packs):
        start = slot = 0
        for s, each in enumerate(pack):
            end = start + len(each["ids"])
            rows["input_ids"][p, start:end], rows["input_mask"][p, start:end] = each["ids"], s + 1
            rows["positions"][p, start:end] = np.arange(end - start)
            lasts[p, s] = end - 1
            starts[p, s], real[p, s], texts[p, s], spans[p, s] = start, 1, each["text"], each["span"] + start
            along[p, start:end], along_weights[p, start:end:2] = each["tokens"], 1
            places = np.arange(start, end, 2)
            masked[p, slot : slot + len(places)], used[p, slot : slot + len(places)] = places, 1
            words[p, slot : slot + len(places)] = each["tokens"][::2]
            start, slot = end, slot + len(places)
    batch = {**rows, "sequence_positions": starts, "last_positions": lasts}
    if head.kind == "masked-language-modelling":
        return {**batch, "masked_positions": masked, "targets": words, "target_weights": used}
    if head.kind in ("token-classification", "causal-language-modelling"):
        return {**batch, "targets": along, "target_weights": along_weights}
    if head.kind == "question-answering":
        return {**batch, "targets": spans, "target_weights": real}
    return {**batch, "targets": texts.astype(np.int32) if head.kind == "classification" else texts, "target_weights": real}
