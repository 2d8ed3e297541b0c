from __future__ import annotations

from dataclasses import asdict

from gaudi_bert.cli.estimate_commands import describe_details, describe_estimate
from gaudi_bert.reporting.estimate import estimate
from tests.builders.reporters import QUIET


def test_two_small_tables_and_a_conclusion() -> None:
    result = asdict(estimate("squad-384", depths=[2, 3, "max"], algorithms=["none", "spfhp", "lpfhp"], reporter=QUIET))
    text = [" ".join(line.split()) for line in describe_estimate(result)]
    assert text == [
        "squad-384: 88,641 sequences of up to 384 tokens",
        "One per row, 44.80 % of the slots hold tokens; the tokens alone need 39,713 packs.",
        "",
        "Share of slots that hold tokens, by the most sequences that a pack may hold:",
        "1 2 3 max",
        "none 44.80 %",
        "spfhp 87.60 % 97.55 % 97.55 %",
        "lpfhp 87.60 % 97.74 % 97.74 %",
        "",
        "Packs above the proven minimum:",
        "none 0",
        "spfhp 0 516 516",
        "lpfhp 0 436 436",
        "proven minimum 88,641 45,335 40,195 40,195",
        "",
        "40,631 packs of depth 3 (lpfhp) replace 88,641 rows, 2.182 times fewer; the proven minimum is 40,195.",
    ]
    widths = {len(line) for line in describe_estimate(result)[5:8] if "max" in line or "%" in line}
    assert max(widths) <= 80


def test_details_have_every_row_other_lengths_and_unpadding() -> None:
    result = asdict(estimate("squad-384", depths=[3, "max"], algorithms=["spfhp", "sort"], reporter=QUIET))
    text = "\n".join(describe_details(result))
    for expected in ("88,641 sequences", "40,711", "97.547 %", "attention x", "2048: 1.2"):
        assert expected in text
    assert "sort: padded to the longest of a batch, " in "\n".join(describe_estimate(result))
