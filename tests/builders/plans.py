"""Plans as their files have them: all groups together, with a part changed, or made from the strategies of the groups."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gaudi_bert.artefacts.plan import Plan, files_sha256, part_path

Mixture = Mapping[tuple[int, ...], int]


def whole_plan(path: Path) -> dict[str, Any]:
    """plan.json with the `files` and `groups` of all its parts."""
    content = json.loads(path.read_text())
    parts = [json.loads(part_path(path, part).read_text()) for part in range(len(content["parts"]))]
    return {**content, **{key: [entry for part in parts for entry in part[key]] for key in ("files", "groups")}}


def change_part(path: Path, part: int, change: Callable[[dict[str, Any]], object], **listed: Any) -> None:
    """Change a part of a plan, and let the table know its bytes; `listed` are other keys of its entry there."""
    content = json.loads(part_path(path, part).read_text())
    change(content)
    data = json.dumps(content).encode()
    part_path(path, part).write_bytes(data)
    plan = json.loads(path.read_text())
    plan["parts"][part] |= {**_digest(data), **listed}
    path.write_text(json.dumps(plan))


def copy_plan(path: Path, folder: Path) -> Path:
    for part in range(len(Plan.read(path).parts)):
        (folder / part_path(path, part).name).write_bytes(part_path(path, part).read_bytes())
    (folder / path.name).write_bytes(path.read_bytes())
    return folder / path.name


def write_plan(path: Path, groups: Sequence[Mixture], max_sequence_length: int, gap: int = 0) -> None:
    """A plan that can only be looked at: no files, nothing proven; each group uses `gap` packs more than its bound."""
    stored = [_group(mixture, gap) for mixture in groups]
    depth = max(len(strategy) for mixture in groups for strategy in mixture)
    masked = {"masked_slots": None, "masked_slots_needed": None, "smaller_masked_slots": []}
    part = {
        "format_version": 2, "part": 0, "signature_sha256": "0" * 64, "depth": depth, "files": [], "groups": stored,
        **masked,
    }  # fmt: skip
    data = json.dumps(part).encode()
    part_path(path, 0).write_bytes(data)
    packs = [group["packs"] for group in stored]
    tokens = [_tokens(mixture) for mixture in groups]
    slots, sequences = sum(packs) * max_sequence_length, sum(group["sequences"] for group in stored)
    totals = {
        "packs": sum(packs), "lower_bound": sum(packs) - gap * len(groups), "gap": gap * len(groups),
        "padding_tokens": slots - sum(tokens), "efficiency": sum(tokens) / slots, "packing_factor": sequences / sum(packs),
        "depth_used": depth, "strategies_used": len({strategy for mixture in groups for strategy in mixture}),
        "algorithm": "nnls", "algorithms_used": ["iterative-nnls"], "sequences": sequences, "tokens": sum(tokens),
        "token_bound": sum(-(-each // max_sequence_length) for each in tokens), "groups": len(groups), **masked,
    }  # fmt: skip
    plan = {
        "format_version": 2, "algorithm": "nnls", "depth": depth, "max_sequence_length": max_sequence_length,
        "max_predictions": None, "masked_slots": None, "seed": 5, "shard_multiple": 32, "shard_bytes": 1000,
        "histogram_sha256": "0" * 64, "vocabulary": None, "writable": False, "totals": totals,
        "files_sha256": files_sha256([]),
    }  # fmt: skip
    listed = {**_digest(data), "packs": packs, "input_bytes": [0] * len(packs)}
    path.write_text(json.dumps({**plan, "parts": [listed]}))


def _digest(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _tokens(mixture: Mixture) -> int:
    return sum(sum(strategy) * count for strategy, count in mixture.items())


def _group(mixture: Mixture, gap: int) -> dict[str, Any]:
    packs, sequences = sum(mixture.values()), sum(len(strategy) * count for strategy, count in mixture.items())
    return {
        "files": [], "sequences": sequences, "packs": packs, "lower_bound": packs - gap,
        "algorithm_used": "iterative-nnls", "strategies": [[list(strategy), count] for strategy, count in mixture.items()],
        "bound_prices": None,
    }  # fmt: skip
