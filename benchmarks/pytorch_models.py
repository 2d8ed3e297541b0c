"""Which types of models of `transformers` are fed packs correctly: every causal and encoder type that is installed.

    python benchmarks/pytorch_models.py [TYPE...]

Of each type that a small random model can be built of, with the head for the next token, for masked tokens, or none:
each packed sequence is held to the same sequence alone (`probe_model`, target transformers-5). *right*: they agree to 1e-5.
*refused*: `PackCollator` refuses the model, with this reason. *WRONG*: neither, which is a defect. *not built*: the software
or a usual config is not complete here.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

from tests.builders.torch_models import HEADS, NotBuiltError, small_random_model, types_of, verdict_on


def main() -> None:
    """Print the table, and the counts."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, PyTorch {torch.__version__}, CPU, float32\n")
    print("| type | head | verdict |\n|---|---|---|", flush=True)
    counts: Counter[tuple[str, str]] = Counter()
    wanted = set(sys.argv[1:])
    for head in HEADS:
        for kind in types_of(head):
            if wanted and kind not in wanted:
                continue
            verdict = of_type(kind, head)
            counts[head, verdict.split(":")[0]] += 1
            print(f"| {kind} | {head} | {verdict} |", flush=True)
    print("\n| head | tried | right | refused | wrong | not built |\n|---|---|---|---|---|---|")
    for head in HEADS:
        right, refused, wrong, unbuilt = (counts[head, each] for each in ("right", "refused", "WRONG", "not built"))
        print(f"| {head} | {right + refused + wrong} | {right} | {refused} | {wrong} | {unbuilt} |")


def of_type(kind: str, head: str) -> str:
    """The verdict on a type with a head."""
    try:
        model: Any = small_random_model(kind, head)
    except NotBuiltError as reason:
        return f"not built: {reason}"
    return verdict_on(model)


if __name__ == "__main__":
    main()
