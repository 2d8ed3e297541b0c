from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.corpus import blocks as module
from gaudi_bert.corpus.blocks import choose_evaluation, form_blocks, form_sections, read_blocks, scan_source
from gaudi_bert.corpus.sources import Source
from tests.builders.properties import examples


@pytest.mark.parametrize(
    ("documents", "fraction", "held_out"), [(79, 0.1, 8), (2, 0.01, 1), (2, 0.99, 1), (5, 0.0, 0), (1, 0.0, 0)]
)
def test_how_many_are_held_out(documents: int, fraction: float, held_out: int) -> None:
    chosen = choose_evaluation(documents, fraction, 12345)
    assert (len(chosen), chosen.sum()) == (documents, held_out)


def test_who_is_held_out_is_a_matter_of_the_seed() -> None:
    assert (choose_evaluation(1000, 0.2, 1) == choose_evaluation(1000, 0.2, 1)).all()
    assert (choose_evaluation(1000, 0.2, 1) != choose_evaluation(1000, 0.2, 2)).any()
    with pytest.raises(InputError, match="single document"):
        choose_evaluation(1, 0.1, 1)


@examples(100)
@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=60), st.integers(1, 23))
def test_blocks_and_sections_divide_the_documents(documents: list[tuple[int, bool]], parts: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_CHARACTERS", 150)
        characters = np.array([size for size, _ in documents], dtype=np.int64)
        chosen = np.array([is_chosen for _, is_chosen in documents], dtype=bool)
        blocks = form_blocks(characters, chosen)
    held = [[number for number in range(block.first, block.stop) if chosen[number]] for block in blocks]
    assert [number for numbers in held for number in numbers] == np.flatnonzero(chosen).tolist()
    assert [block.number for block in blocks] == list(range(len(blocks)))
    assert all(
        block.characters == characters[numbers].sum() < 150 + 300 for block, numbers in zip(blocks, held, strict=True)
    )
    assert all(len(numbers) >= min(2, chosen.sum()) for numbers in held)
    if not blocks:
        return
    sections = form_sections("train", blocks, parts)
    assert [block for section in sections for block in section.blocks] == blocks
    assert [part for section in sections for part in section.parts] == list(range(parts))
    assert all(section.blocks and len(section.parts) for section in sections)


def test_large_text_is_divided_by_its_size() -> None:
    blocks = form_blocks(np.full(1000, module.BLOCK_CHARACTERS), np.ones(1000, dtype=bool))
    sections = form_sections("train", blocks, 16)
    assert len(blocks) == 500
    assert [len(section.blocks) for section in sections] == [125] * 4


def write_sources(folder: Path) -> list[Source]:
    sources = []
    for name, text in {"a": "0.\n\n1.\n\n2.\n", "b": "3.\n", "c": "4.\n4.\n\n5.\n\n6.\n"}.items():
        (folder / name).write_text(text)
        sources.append(Source(name, folder / name, 0))
    return sources


def test_blocks_are_read_over_the_borders_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_CHARACTERS", 5)
    scans = [scan_source(source) for source in write_sources(tmp_path)]
    characters = np.concatenate([scan.document_characters for scan in scans])
    assert characters.tolist() == [2, 2, 2, 2, 4, 2, 2]
    chosen = np.array([1, 0, 1, 1, 0, 1, 1], dtype=bool)
    blocks = form_blocks(characters, chosen)
    read = [(block.number, documents) for block, documents in read_blocks(scans, chosen, blocks)]
    assert read == [(0, [["0."], ["2."], ["3."]]), (1, [["5."], ["6."]])]
    assert [documents for _, documents in read_blocks(scans, chosen, blocks[1:])] == [[["5."], ["6."]]]
    (tmp_path / "c").write_text("4.\n")
    with pytest.raises(FailedError, match="changed while it was read"):
        list(read_blocks(scans, chosen, blocks))


def test_a_source_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blank").write_text(" \n\n")
    with pytest.raises(InputError, match="blank: holds no text"):
        scan_source(Source("blank", tmp_path / "blank", 3))
