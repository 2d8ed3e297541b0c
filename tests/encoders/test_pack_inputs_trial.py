"""What a model does is found by trying it: causal or not, windows, positions; then it is tried as it will be used: its head,
its labels, its software, long rows, special tokens and training mode. What cannot be fed packs is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from tests.builders.agree import agree
from tests.builders.effort import LONG, sampled

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
transformers = pytest.importorskip("transformers", minversion="5")


from gaudi_bert.pytorch import PackCollator, PackedEncoder, model_inputs  # noqa: E402
from tests.builders.encoders import TEXTS, TOKENIZER  # noqa: E402
from tools.type_scan import scan, table, types, verdict_on  # noqa: E402

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "initializer_range": 0.3,
}
SAMPLE = {
    "next token": ("gemma", "mixtral", "falcon", "mistral", "mpt", "bert"),
    "masked tokens": ("albert", "modernbert"),
    "tags": ("t5",),
}
REFUSED = {
    "next token": ("mamba", "jamba", "bloom", "bart"),
    "masked tokens": ("deberta-v2", "longformer", "big_bird", "fnet"),
}


def cases(chosen: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(kind, head) for head, kinds in chosen.items() for kind in kinds]


@pytest.mark.parametrize(("kind", "head"), sampled(cases(SAMPLE), 3))
def test_packs_are_what_the_sequences_are_alone(kind: str, head: str) -> None:
    assert verdict_on(kind, head) == "right"


@pytest.mark.parametrize("seed", [8, 10])
def test_fresh_weights_in_which_tokens_hardly_move_one_another_are_no_obstacle(seed: int) -> None:
    torch.manual_seed(seed)
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "max_position_embeddings": 258}
    config = transformers.RobertaConfig(
        **{**SIZES, "vocab_size": 4096, "hidden_size": 64, "initializer_range": 0.02}, **special
    )
    assert not PackCollator("transformers-5", transformers.RobertaForMaskedLM(config)).pack_inputs.is_causal


@pytest.mark.parametrize(("kind", "head"), cases(REFUSED))
def test_what_no_mask_is_right_for_is_refused(kind: str, head: str) -> None:
    verdict = verdict_on(kind, head)
    assert verdict.startswith("refused: ")
    assert "a single sequence in each row" in verdict
    assert "\n" not in verdict


PAGE = Path(__file__).resolve().parents[2] / "docs" / "pytorch.md"
AGAIN = "run `python_version -m tools.type_scan`, which writes the table of docs/pytorch.md"


def test_the_page_has_every_type_of_the_version_that_it_names() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if f"`transformers` {transformers.__version__} |" not in page:
        pytest.skip(f"the page is of another version of transformers than {transformers.__version__}: {AGAIN}")
    absent = [kind for kind in types() if not re.search(rf"[ |]{re.escape(kind)}[, ]", page)]
    assert not absent, AGAIN


@pytest.mark.slow
@pytest.mark.repeated
def test_every_type_is_right_or_refused_in_words_of_ours() -> None:
    """Ten minutes for all types: `make test-all` tries one in twenty."""
    verdicts = list(scan(types() if LONG else types()[::20]))
    assert [verdict for verdict in verdicts if verdict[2].startswith("WRONG")] == []
    if LONG and f"`transformers` {transformers.__version__} |" in PAGE.read_text(encoding="utf-8"):
        assert table(verdicts) in PAGE.read_text(encoding="utf-8"), AGAIN


def test_a_model_that_is_not_what_its_config_makes_is_refused() -> None:
    """An encoder made of a causal model: its config says nothing of it."""
    model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES, attn_implementation="eager")).eval()
    given = torch.zeros(1, 1, 1, 1)
    model.register_forward_pre_hook(
        lambda module, inputs, named: (inputs, {**named, "attention_mask": given}), with_kwargs=True
    )  # every token sees every other
    with pytest.raises(InputError, match="the config describes a causal model, but the model is not causal"):
        PackCollator("transformers-5", model)


def test_a_model_that_its_copy_does_not_speak_for_is_refused() -> None:
    """Other positions than those that it gets: a copy of its config has no such hook."""
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()

    def later(module: torch.nn.Module, inputs: tuple, named: dict) -> tuple:
        return inputs, {name: value + 1 if name == "position_ids" else value for name, value in named.items()}

    model.register_forward_pre_hook(later, with_kwargs=True)
    with pytest.raises(InputError, match="BertModel: the model computes wrong outputs for packs of 144 tokens"):
        PackCollator("transformers-5", model)


# --- a model is tried as it will be used

WIDTH, SEP = 16, 102
NARROW = {"vocab_size": 300, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
BERT = {**NARROW, "initializer_range": 0.3, "pad_token_id": 1, "sep_token_id": SEP}
LLAMA = {**NARROW, "initializer_range": 0.3, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 300, "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "initializer_range": 0.3}


def random_model(name: str, config: str, **settings: Any) -> Any:
    torch.manual_seed(7)
    return getattr(transformers, name)(getattr(transformers, f"{config}Config")(**settings)).eval()


def row(lengths: tuple[int, ...], total: int, seed: int = 3) -> dict:
    random, numbers = np.random.default_rng(seed), np.repeat(np.arange(1, len(lengths) + 1), lengths)
    pads = total - len(numbers)
    ids = np.pad(random.integers(5, 300, len(numbers)), (0, pads))
    return {
        "input_ids": ids,
        "token_type_ids": np.where(np.pad(numbers, (0, pads)) > 0, ids % 2, 0),
        "position_ids": np.concatenate([np.arange(each) for each in (*lengths, pads)]),
        "sequence_ids": np.pad(numbers, (0, pads)),
        "seq_lens": np.array(lengths),
        "labels": np.where(np.pad(numbers, (0, pads)) > 0, ids % 3, -100),
    }


ROWS = [row((40, 23, 7), 71), row((30, 41), 71, seed=4)]


def parts(rows: list[dict], *names: str) -> list[dict]:
    """Columns of each sequence by itself."""
    return [
        {name: torch.tensor(each[name][None, each["sequence_ids"] == number]) for name in names}
        for each in rows
        for number in range(1, len(each["seq_lens"]) + 1)
    ]


def check_outputs(model: Any, collator: PackCollator, rows: list[dict], *names: str) -> None:
    """Packed and alone are the same."""
    with torch.no_grad():
        batch = {name: value for name, value in model_inputs(collator(rows)).items() if name != "labels"}
        packed = model(**batch)[0][torch.from_numpy(np.stack([each["sequence_ids"] for each in rows])) > 0]
        alone = torch.cat([model(**part)[0][0] for part in parts(rows, "input_ids", *names)])
    agree(packed.numpy(), alone.numpy(), 1e-5, scale=1.0)


# --- what labels mean


@pytest.mark.parametrize(("kind", "settings"), [("Llama", LLAMA), ("Qwen2", LLAMA), ("GPT2", GPT2)])
def test_tags_of_a_causal_model_have_a_label_for_each_token(kind: str, settings: dict) -> None:
    model = random_model(f"{kind}ForTokenClassification", kind, **settings, num_labels=3)
    batch = PackCollator("transformers-5", model)(ROWS)
    assert batch["labels"].tolist() == [each["labels"].tolist() for each in ROWS]
    alone = [model(**part) for part in parts(ROWS, "input_ids", "labels")]
    counts = [out.logits.shape[1] for out in alone]
    expected = sum(out.loss.item() * count for out, count in zip(alone, counts, strict=True)) / sum(counts)
    agree(model(**model_inputs(batch)).loss.item(), expected, 1e-5)


def test_a_config_tells_tags_from_next_tokens_by_its_architecture() -> None:
    config = transformers.GPT2Config(**GPT2)
    for name, first in (("GPT2ForTokenClassification", ROWS[0]["labels"][0]), ("GPT2LMHeadModel", -100)):
        config.architectures = [name]
        assert PackCollator("transformers-5", config)(ROWS)["labels"][0, 0] == first
    model = random_model("GPT2LMHeadModel", "GPT2", **GPT2)
    model.config.eos_token_id = [7, 299]  # GLM has several
    assert PackCollator("transformers-5", model)(ROWS)["labels"][0, [0, 40, 63]].tolist() == [-100] * 3


# --- targets, token types


@pytest.mark.parametrize("target", ["transformers-5", "transformers-4", "optimum-habana", "flash", "flex"])
@pytest.mark.parametrize(("name", "kind", "settings"), [("BertModel", "Bert", BERT), ("GPT2LMHeadModel", "GPT2", GPT2)])
def test_a_target_that_this_software_ignores_is_refused(name: str, kind: str, settings: dict, target: str) -> None:
    model = random_model(name, kind, **settings)
    for given in (model, model.config):
        if target == "transformers-5":
            check_outputs(model, PackCollator(target, given), ROWS, *(["token_type_ids"] if kind == "Bert" else []))
            continue
        with pytest.raises(InputError, match=f"^target = '{target}': .*use (another target|target transformers-5)$"):
            PackCollator(target, given)


def test_a_target_needs_to_know_the_attention() -> None:
    with pytest.raises(InputError, match=r"target = 'flash': .*'flash_attention_2'.* config"):
        PackCollator("flash", "bert")
    flash = transformers.BertConfig(**BERT, attn_implementation="flash_attention_2")
    assert PackCollator("flash", flash)(ROWS)["cu_seq_lens_q"].tolist() == [0, 40, 63, 70, 100, 141]
    with pytest.raises(InputError, match=r"target = 'transformers-5': .*'sdpa'.* 'flash_attention_2'"):
        PackCollator("transformers-5", flash)


@pytest.mark.parametrize(
    ("kind", "more"), [("Roberta", {"type_vocab_size": 2}), ("Bert", {"is_decoder": True}), ("Bert", {})]
)
def test_token_types_reach_every_model_that_takes_them(kind: str, more: dict) -> None:
    model = random_model(f"{kind}Model", kind, **BERT, **more)
    check_outputs(model, PackCollator("transformers-5", model), ROWS, "token_type_ids")


# --- RoPE that depends on the longest sequence of a batch

LIMIT = 150
ROPE = {
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}, LIMIT),
    "longrope": (
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": LIMIT,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
        4 * LIMIT,
    ),
}


@pytest.mark.parametrize("kind", ROPE)
def test_sequences_that_change_the_positions_of_others_are_refused(kind: str) -> None:
    rope, positions = ROPE[kind]
    model = random_model("LlamaModel", "Llama", **LLAMA, rope_parameters=rope, max_position_embeddings=positions)
    collator = PackCollator("transformers-5", model)
    assert collator.pack_inputs.longest_sequence == LIMIT
    check_outputs(model, collator, [row((LIMIT, 31), 401), row((13, LIMIT - 1, 2), 401)])  # padding is longer than the limit
    with pytest.raises(InputError, match=f"{LIMIT + 1} tokens.* sequences of at most {LIMIT} tokens"):
        collator([row((LIMIT + 1,), 401), row((3, 5), 401)])
    assert PackedEncoder(model, TOKENIZER).max_sequence_length == LIMIT


# --- long rows, special tokens, training


def shifted(by: int) -> Callable:
    """Each hidden state and the one `by` places before it."""
    return lambda model, hidden, ids: hidden + torch.nn.functional.pad(hidden, (0, 0, by, 0))[:, : hidden.shape[1]]


# What a BERT does to its hidden states, where packs would show it.
CHANGES: dict[str, Callable] = {
    "far": shifted(300),
    "farther": shifted(700),
    "separators": lambda model, hidden, ids: hidden + 0.1 * (ids == SEP).cumsum(1)[..., None],
    "training": lambda model, hidden, ids: hidden + hidden.mean(1, keepdim=True) if model.training else hidden,
    "statistics": lambda model, hidden, ids: model.norm(hidden.transpose(1, 2)).transpose(1, 2),
}


def changed(name: str, **more: Any) -> Any:
    def change(model: Any, _: tuple, named: dict, output: Any) -> Any:
        output.last_hidden_state = CHANGES[name](model, output.last_hidden_state, named["input_ids"])
        return output

    model = random_model("BertModel", "Bert", **{**BERT, "max_position_embeddings": 256, **more})
    model.norm = torch.nn.BatchNorm1d(WIDTH).eval()
    model.register_forward_hook(change, with_kwargs=True)
    return model


@pytest.mark.parametrize("name", ["far", "separators", "training", "statistics"])
def test_what_only_long_rows_special_tokens_or_training_show_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="a single sequence in each row"):
        PackCollator("transformers-5", changed(name))


def test_rows_are_tried_before_they_are_collated() -> None:
    model = changed("farther")
    collator = PackCollator("transformers-5", model)
    assert collator([row((200, 300), 512)])["input_ids"].shape == (1, 512)
    with pytest.raises(InputError, match=r"513 tokens.* rows of 512.* row_tokens=513"):
        collator([row((200, 300), 513)])
    with pytest.raises(InputError, match="computes wrong outputs for packs of 713 tokens"):
        PackCollator("transformers-5", model, row_tokens=713)
    for wrong in (0, 1, -5, 1.5, True, "512"):
        with pytest.raises(InputError, match=f"row_tokens = {wrong!r}: must be an integer of at least 2"):
            PackCollator(row_tokens=wrong)


def test_the_encoder_tries_rows_as_long_as_it_computes() -> None:
    torch.manual_seed(7)
    encoder = PackedEncoder(changed("farther", max_position_embeddings=1024), TOKENIZER)
    assert encoder.embed(TEXTS[:3]).shape == (3, WIDTH)
    with pytest.raises(InputError, match="BertModel: the model computes wrong outputs for packs of 1024 tokens"):
        encoder.embed([" ".join(TEXTS)])


def test_a_trial_changes_neither_statistics_nor_modes() -> None:
    model = changed("statistics").train()
    model.embeddings.eval()
    state, drawn = {name: value.clone() for name, value in model.state_dict().items()}, torch.random.get_rng_state()
    with pytest.raises(InputError, match="in training mode, sequences change their neighbours"):
        PackCollator("transformers-5", model)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert (model.training, model.norm.training, model.embeddings.training) == (True, True, False)
