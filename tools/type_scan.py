"""Test packs with every model type of the installed `transformers` that has a head which the engine trains.

    python -m tools.type_scan [TYPE...]

Without types, the program tests all installed types (eight minutes on one core), and writes the tables of
docs/pytorch.md#models-targets-heads. With types, it prints their verdicts: *right*, *refused*, *not built* (no small random
model of the type can be built here), or *WRONG*, which is a defect.

For each type and head, the engine builds a tiny random model in the same way as `train` and `finetune`. The outputs for
packed sequences are compared with the outputs of the model's own class for each sequence alone. A model may be refused, but
only with a message of gaudi-bert that quotes no Python error.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from gaudi_bert.common.errors import InputError
from gaudi_bert.encoders.packed_model import _extract_logits
from gaudi_bert.encoders.trial import (
    MODEL_ERRORS,
    _randomize_weights,
    build_small_copy,
    explain_library_error,
    find_ordinary_tokens,
    quiet_transformers,
)
from gaudi_bert.engines.protocol import ModelSpec
from gaudi_bert.engines.pytorch.encoder_model import build_encoder
from gaudi_bert.model.config import EncoderConfig
from gaudi_bert.model.heads import TaskHead
from tests.builders.task_batches import batch_of, packs_of

HEADS = {
    "next token": (TaskHead("causal-language-modelling"), modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked tokens": (TaskHead("masked-language-modelling"), modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "texts": (TaskHead("classification", 3), modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    "tags": (TaskHead("token-classification", 4), modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
}
HEADS["answers"] = (TaskHead("question-answering", 2), modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES)
# Settings that transformers does not define by default, but without which no model of the type works.
OPEN = {"esm": {"pad_token_id": 1, "mask_token_id": 4, "position_embedding_type": "rotary"}}
WINDOW = 24  # different from the window with which the mask format was found
PYTHON = re.compile(r"\w(Error|Exception)\b|Traceback|'\w+' object|index out of range|size of tensor|unexpected keyword")
"""Texts of Python errors, which the message of a rejected model must not contain."""
_BOUND, _EXACT_BOUND = 1e-5, 1e-9
PAGE = Path(__file__).resolve().parent.parent / "docs" / "pytorch.md"
BLOCK = re.compile(r"(?<=<!-- types -->\n).*?(?=\n<!-- end of types -->)", re.DOTALL)


def types() -> list[str]:
    """Return the model types that have at least one of the heads, sorted."""
    return sorted({kind for _, names in HEADS.values() for kind in names})


def heads_of(kind: str) -> list[str]:
    """Return the heads that a type has."""
    return [name for name, (_, names) in HEADS.items() if kind in names]


def scan(kinds: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (type, head, verdict). The verdict is `right`, `refused: REASON`, `not built: REASON` or `WRONG: PROBLEM`."""
    for kind in kinds:
        for name in heads_of(kind):
            yield kind, name, verdict_on(kind, name)


def verdict_on(kind: str, name: str) -> str:
    """Return the verdict on one type with one head."""
    with warnings.catch_warnings(), quiet_transformers():
        warnings.simplefilter("ignore")
        return _verdict(kind, name)


def _verdict(kind: str, name: str) -> str:
    head, names = HEADS[name]
    try:
        class_name = names[kind]
        made = getattr(transformers, class_name[0] if isinstance(class_name, tuple | list) else class_name)
        filled = _filled_config(kind, made, causal=head.is_causal)
        for setting, value in OPEN.get(kind, {}).items():
            setattr(filled, setting, value)
        config = build_small_copy(filled, made, WINDOW).config
        values = {name: _of_layers(value, config) for name, value in config.to_dict().items()}
    except MODEL_ERRORS as error:
        return f"not built: {explain_library_error(error)}"
    try:
        model = build_encoder(ModelSpec(EncoderConfig(values), head), None, seed=1)
    except InputError as error:
        quoted = PYTHON.search(str(error))
        return f"WRONG: it quotes Python: {error}" if quoted else f"refused: {error}"
    torch.manual_seed(11)
    _randomize_weights(model.module)
    difference = difference_alone(model, head)
    if difference > _BOUND:  # in float64, rounding errors become negligible, but defects remain
        model.module.double()
        if hasattr(model.module, "set_experts_implementation"):  # the default implementation does not support float64
            model.module.set_experts_implementation("eager")
        difference = difference_alone(model, head) * _BOUND / _EXACT_BOUND
    return "right" if difference <= _BOUND else f"WRONG: packed and alone differ by {difference:.1e} of the largest output"


def _filled_config(kind: str, class_of_type: Any, *, causal: bool) -> Any:
    """Return the default config of a type for a class, with values for settings that `transformers` leaves undefined."""
    config = transformers.AutoConfig.for_model(kind)
    if not isinstance(
        config, class_of_type.config_class
    ):  # a model of text and images, of which this head uses only the text part
        config = config.get_text_config()
    for each in {id(one): one for one in (config, config.get_text_config())}.values():
        usual = {
            "vocab_size": 211,
            "num_key_value_heads": vars(each).get("num_attention_heads"),
            "head_dim": 16,
            "num_experts_per_tok": 2,
        }
        for name, value in usual.items():
            if vars(each).get(name, value) is None:
                setattr(each, name, value)
        if causal and hasattr(each, "is_decoder"):
            each.is_decoder = True
    return config


def _of_layers(value: Any, config: Any) -> Any:
    """Remove from a setting with one entry per layer the entries for layers that the small copy does not have."""
    if not isinstance(value, dict) or not value or not all(str(key).isdecimal() for key in value):
        return value
    return {key: own for key, own in value.items() if int(key) < config.get_text_config().num_hidden_layers}


def difference_alone(model: Any, head: TaskHead) -> float:
    """Return the largest difference between the outputs of packed and single sequences, relative to the largest output."""
    tokens = find_ordinary_tokens(model.module.config)
    packs = packs_of(head, len(tokens) + 5)
    for each in (each for pack in packs for each in pack):
        each["ids"] = tokens[each["ids"] - 5]
    batch, largest, scale = batch_of(packs, head), 0.0, 1e-30
    with torch.no_grad():
        packed = model.forward(model.copy_to_device(batch), False)
        for row, pack in enumerate(packs):
            for number, each in enumerate(pack):
                alone = _extract_logits(model.module(input_ids=torch.from_numpy(each["ids"][None])))[0]
                start = int(batch["sequence_positions"][row, number])
                if head.predicts_per_text:
                    own = packed[row, number]
                elif head.kind == "masked-language-modelling":
                    slots = torch.from_numpy(batch["masked_positions"][row])
                    chosen = (
                        (slots >= start)
                        & (slots < start + len(each["ids"]))
                        & torch.from_numpy(batch["target_weights"][row] > 0)
                    )
                    own, alone = packed[row][chosen], alone[slots[chosen] - start]
                else:
                    own = packed[row, start : start + len(each["ids"])]
                if own.shape != alone.shape:
                    return float("inf")
                largest, scale = max(largest, float((own - alone).abs().max())), max(scale, float(alone.abs().max()))
    return largest / scale


# --- the table of docs/pytorch.md

_ALIKE = (
    (re.compile(r"carry a state"), "layers that carry a state from one sequence into the next"),
    (re.compile(r"encoder-decoder models"), "an encoder with a decoder, which reads another text"),
    (re.compile(r"accepts no position_ids"), "it takes no positions, and no mask is right for it"),
    (re.compile(r"fails on packs of|no mask keeps|computes wrong outputs"), "no mask is right for it"),
    (re.compile(r"input_ids alone|a short input"), "it needs inputs besides tokens"),
    (re.compile(r"the head returns"), "its head mixes the texts of a row"),
    (re.compile(r"how the model numbers"), "its positions cannot be determined"),
    (re.compile(r"one output vector per token"), "it gives no vector for each token"),
    (re.compile(r"no measurable effect on the outputs"), "its attention cannot be seen at work"),
    (re.compile(r"has no class|rejects the config|at least 16"), "its usual config is not one of such a model"),
    (re.compile(r"^not built"), "not built here: its usual config is too large or not complete"),
)


def table(verdicts: list[tuple[str, str, str]]) -> str:
    """Format the verdicts as Markdown tables: the number of types for each head, and the types for each verdict."""
    groups: dict[str, dict[str, list[str]]] = {}
    for kind, head, verdict in verdicts:
        groups.setdefault(_group(verdict), {}).setdefault(kind, []).append(head)
    lines = [f"| head, in `transformers` {transformers.__version__} | right | refused | wrong | not built |"]
    lines.append("|---|---|---|---|---|")
    for head in HEADS:
        own = [verdict.split(":")[0] for _, name, verdict in verdicts if name == head]
        lines.append(
            f"| {head} | {' | '.join(str(own.count(each)) for each in ('right', 'refused', 'WRONG', 'not built'))} |"
        )
    lines += ["", "| verdict | types, with every head they have or with those named |", "|---|---|"]
    for group, kinds in sorted(groups.items(), key=lambda item: (item[0] != "right", -len(item[1]))):
        lines.append(f"| {group} | {', '.join(_named(kind, heads) for kind, heads in sorted(kinds.items()))} |")
    return "\n".join(lines)


def _group(verdict: str) -> str:
    return next((words for pattern, words in _ALIKE if pattern.search(verdict)), verdict.split(":")[0])


def _named(kind: str, heads: list[str]) -> str:
    return kind if heads == heads_of(kind) else f"{kind} ({', '.join(heads)})"


def main() -> None:
    """Print each verdict as soon as it is known. If all types were tested, write the tables."""
    verdicts = []
    for verdict in scan(sys.argv[1:] or types()):
        verdicts.append(verdict)
        print(*verdict, sep=" | ", flush=True)
    if not sys.argv[1:]:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(BLOCK.sub(lambda _: table(verdicts), page), encoding="utf-8")


if __name__ == "__main__":
    main()
