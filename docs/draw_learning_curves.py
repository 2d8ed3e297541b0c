"""Draw docs/learning-curves.svg from the numbers in docs/learning-curves.json, which benchmarks/learning_curves.py writes.

python docs/draw_learning_curves.py

Two panels over the sequences seen: lines are means of the seeds, bands their range.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "benchmarks"))

from learning_curves import interpolate_curves  # noqa: E402

from gaudi_bert.common.files import write_text  # noqa: E402

STYLES = {
    "unpacked": ("#1f3a5f", "unpacked", "-"),
    "packed": ("#e07a1f", "packed", "-"),
    "bfloat16": ("#7a4aa0", "packed, bfloat16", ":"),
    "no mask": ("#b3261e", "packed without the mask", "-"),
    "no restart": ("#2f8f6b", "packed without restarted positions", "-"),
}
PANELS = {
    "Packed training is unpacked training": ("unpacked", "packed", "bfloat16"),
    "What the mask and the positions are for": ("packed", "no mask", "no restart"),
}


def draw(content: dict[str, Any]) -> str:
    """The picture as SVG text; the same numbers give the same text."""
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "learning-curves", "font.family": "sans-serif"})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9.6, 3.9), sharey=True, layout="constrained")
    for axes, (title, variants) in zip(panels, PANELS.items(), strict=True):
        for variant in variants:
            colour, label, line = STYLES[variant]
            places, values = interpolate_curves(content, variant, "masked_lm_loss")
            axes.plot(places / 1000, values.mean(axis=0), line, color=colour, label=label, linewidth=1.6)
            lowest, highest = values.min(axis=0), values.max(axis=0)
            axes.fill_between(places / 1000, lowest, highest, color=colour, alpha=0.18, linewidth=0)
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_xlabel("sequences seen (thousands)")
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9, loc="upper right")
    panels[0].set_ylabel("masked-LM loss, held-out sequences")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return text.getvalue()


if __name__ == "__main__":
    write_text(DOCS / "learning-curves.svg", draw(json.loads((DOCS / "learning-curves.json").read_text(encoding="utf-8"))))
