"""Which way of feeding packs is right for which model and attention, as the table of docs/what-packing-changes.md#how-packs-leak-and-how-to-feed-them-correctly.

    python benchmarks/leaks.py [MODEL...]

Small random models of `transformers` on a CPU. A figure is the largest difference of an output: packed against alone where
a way is right, by a changed neighbour where it leaks. Flex attention runs with its mask in plain PyTorch here.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

from gaudi_bert.pytorch import probe_model
from gaudi_bert.pytorch.probe import WAYS, Finding
from gaudi_bert.pytorch.trial import NEIGHBOUR_BOUND
from tests.builders.torch_models import MODELS, small_model

ATTENTIONS = ("sdpa", "eager", "flex_attention")


def cell(finding: Finding) -> str:
    """One entry of the table."""
    if finding.alone is None or finding.neighbour is None:
        return "refused"
    if finding.is_right:
        return f"right, {finding.alone:.0e}"
    if finding.neighbour > NEIGHBOUR_BOUND * finding.scale:
        return f"**leaks, {finding.neighbour:.1g}**"
    return f"**wrong, {finding.alone:.1g}**"


def main() -> None:
    """Print the table."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, PyTorch {torch.__version__}, CPU, float32\n")
    print("| model, attention | " + " | ".join(WAYS) + " |")
    print("|---" * (len(WAYS) + 1) + "|", flush=True)
    for name in sys.argv[1:] or MODELS:
        for attention in ATTENTIONS:
            try:
                findings = probe_model(small_model(name, attention))
            except ValueError:  # transformers does not offer it for this model
                continue
            print(f"| {name}, {attention.split('_')[0]} | " + " | ".join(map(cell, findings)) + " |", flush=True)


if __name__ == "__main__":
    main()
