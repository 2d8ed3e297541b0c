"""Tools for trials of models: packs of random tokens, outputs of packed and single sequences, and small copies of models.

A small copy has the architecture of a config with all its kinds of layers, but random weights and few parameters. Its
attention windows are short, because the effect of a window can only be measured in sequences that are longer than the
window.

Letters in shapes: B packs, L positions, T tokens, H outputs of a token.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import huggingface_hub.errors
import numpy as np
import torch
import transformers

from gaudi_bert.common.arrays import AnyArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.encoders.pack_inputs import PackInputs

# A pack of sequences. It maps column names to arrays.
Pack = Mapping[str, AnyArray]


class TrialPacks(NamedTuple):
    """Two versions of packs of random tokens. Running a model on both shows whether a sequence affects its neighbours,
    because only the first sequence of each pack differs.

    Attributes:
        packs: The packs.
        changed_packs: The same packs with other tokens in the first sequence of each pack.
    """

    packs: list[Pack]
    changed_packs: list[Pack]


TRIAL_SEED = 12345
# The largest difference that is allowed between the outputs for packed sequences and those for single sequences. If the
# largest output exceeds 1, the difference is relative to this output.
ALLOWED_DIFFERENCE = 1e-5
_LENGTH_FRACTIONS = ((0.38, 0.31, 0.24), (0.55, 0.4), (0.97,))
_SPECIAL_TOKENS = ("bos", "cls", "sep", "eos", "mask", "unk")
_LARGE_MODEL_WEIGHTS = 10_000_000  # number of weights from which on a model is tried with several threads
_LOW_IDS = 128  # most tokenizers have their special tokens among the first ids: 0 to 4, 50 to 60, 100 to 103, ...
_CONFIG_ERROR = getattr(huggingface_hub.errors, "StrictDataclassError", ValueError)  # in newer versions
# A model of `transformers` may raise any of these exceptions if its input or config is not suitable.
MODEL_ERRORS = (
    InputError,
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    ImportError,
    AssertionError,
    NotImplementedError,
    ZeroDivisionError,
    _CONFIG_ERROR,
)
_KIND_OF_ERROR = re.compile(r"^(.*?\b\w+Error: )+")
_ERRORS_FOR_USERS = (ValueError, OSError)  # built-in exceptions whose messages are written for the user


def explain_library_error(error: BaseException, max_characters: int = 200) -> str:
    """Return the text for an error message that explains briefly why another library rejected a file or a setting.

    The message of the error is returned if it was probably written for users. Messages of other errors, such as a TypeError,
    would not help a user, so a general reason is returned instead.

    Args:
        error: The error that the library raised.
        max_characters: The maximum length of the message, in characters.
    """
    message = _KIND_OF_ERROR.sub("", " ".join(str(error).split()))[:max_characters]
    meant = isinstance(error, _ERRORS_FOR_USERS) or type(error).__module__ != "builtins"
    return message if meant and message else "the settings contradict each other"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress the progress bars, tables and warnings of `transformers` and PyTorch while the context is open."""
    library = transformers.utils.logging
    level, shows_bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity(library.CRITICAL)
    library.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        library.set_verbosity(level)
        if shows_bars:
            library.enable_progress_bar()


@contextmanager
def make_computation_reproducible(one_thread: bool = True) -> Iterator[None]:
    """Disable gradients and compilation while the context is open, so that trials are fast and reproducible.

    Args:
        one_thread: Whether PyTorch uses only one thread, which is faster for a few tokens unless the model is large.
    """
    # Trials of a model are short, so turn off torch.compile for them. PyTorch before 2.6 has no `set_stance`.
    stance = torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if one_thread else threads)
    try:
        with torch.no_grad(), stance:
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def temporary_evaluation_mode(model: transformers.PreTrainedModel) -> Iterator[None]:
    """Put a model into evaluation mode without gradients while the context is open. On exit, restore the mode and the
    buffers.

    Raises:
        InputError: The model raised an error. The message is a single line.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()  # noqa: SLF001 - some models replace them
        if buffer is not None
    ]
    model.eval()
    try:
        with make_computation_reproducible(sum(weights.numel() for weights in model.parameters()) < _LARGE_MODEL_WEIGHTS):
            yield
    except MODEL_ERRORS as error:
        reason = str(error) if isinstance(error, InputError) else "the model raises an error for a short input"
        if getattr(model.config, "output_router_logits", False):
            reason += "; the load-balancing loss does not support packs: set model.config.output_router_logits = False"
        raise InputError(f"{type(model).__name__}: the model cannot be tested: {reason}") from error
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer.copy_(value)  # noqa: SLF001


def find_max_positions(config: transformers.PretrainedConfig) -> int | None:
    """Return the number of positions that a config specifies. Return None if there is no limit, which XLNet's config writes
    as -1.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if type(positions) is int and positions >= 0 else None


def choose_trial_length(config: transformers.PretrainedConfig, position_offset: int, max_tokens: int = 144) -> int:
    """Return the number of tokens per pack for trials of a model.

    Args:
        config: The config of the model.
        position_offset: The position of the first token of a sequence.
        max_tokens: The maximum. The default is larger than short windows and blocks of attention.

    Raises:
        InputError: The model has too few positions.
    """
    positions = find_max_positions(config)
    length = max_tokens if positions is None else min(max_tokens, positions - position_offset)
    if length < 16:
        raise InputError(f"max_position_embeddings = {positions}: must be at least 16 so that packs can be tested")
    return length


def build_trial_packs(
    config: transformers.PretrainedConfig,
    length: int,
    longest_sequence: int | None = None,
    excluded_token: int | None = None,
    *,
    padded: bool = True,
) -> TrialPacks:
    """Return packs of random tokens, and the same packs with other tokens in the first sequence of each pack.

    Args:
        config: The config of the model.
        length: The number of positions of a pack.
        longest_sequence: The maximum number of tokens in a sequence, or None.
        excluded_token: A token id that no pack may contain, or None.
        padded: Whether to return three packs with padding. Otherwise return one pack without padding. Its sequences get
            shorter down to a single token.
    """
    most = longest_sequence or length
    sequence_lengths = [[min(int(share * length), most) for share in shares] for shares in _LENGTH_FRACTIONS if padded]
    if not padded:
        sequence_lengths, remaining = [[]], length
        while remaining:
            sequence_lengths[0].append(min((remaining + 1) // 2, most))
            remaining -= sequence_lengths[0][-1]
    # Put special tokens such as [SEP] and [MASK] into the packs, because models may process them differently. Leave out
    # padding and all other tokens that the config names, because such a token may stand for an image, for example.
    text, usual = config.get_text_config(), find_ordinary_tokens(config)
    special_ids = [getattr(text, f"{name}_token_id", None) for name in _SPECIAL_TOKENS]
    ids = {one for each in special_ids for one in (each if isinstance(each, list) else [each]) if type(one) is int}
    special = [each for each in ids - {getattr(text, "pad_token_id", None)} if 0 <= each < text.vocab_size]
    low = np.setdiff1d(np.arange(min(_LOW_IDS, text.vocab_size)), [*_find_configured_tokens(config)])
    tokens = np.array(sorted({*special, *low.tolist(), *usual[usual >= _LOW_IDS][: len(low)].tolist()} - {excluded_token}))
    random = np.random.default_rng(TRIAL_SEED)
    turns = 1 + length * len(sequence_lengths) // len(tokens)
    order = np.concatenate([random.permutation(len(tokens)) for _ in range(turns)])  # contains every token, if there is room
    rows: list[Pack] = []
    changed: list[Pack] = []
    for each in sequence_lengths:
        lengths = np.array(each)
        numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        pads = length - len(numbers)
        chosen, order = np.split(order, [len(numbers)])
        row = {
            "input_ids": np.pad(tokens[chosen], (0, pads)),
            "token_type_ids": np.pad(np.concatenate([np.arange(n) >= n // 2 for n in lengths]).astype(int), (0, pads)),
            "position_ids": np.concatenate([np.arange(n) for n in (*lengths, pads)]),
            "sequence_ids": np.pad(numbers, (0, pads)),
            "seq_lens": lengths,
        }
        changed_tokens = tokens[np.where(numbers == 1, (chosen + 1) % len(tokens), chosen)]
        rows.append(row)
        changed.append({**row, "input_ids": np.pad(changed_tokens, (0, pads))})
    return TrialPacks(rows, changed)


def find_ordinary_tokens(config: transformers.PretrainedConfig) -> AnyArray:
    """Return the token ids that have no special meaning: all except the first few ids and the ids that the config names.

    Raises:
        InputError: The vocabulary has fewer than two such tokens.
    """
    text = config.get_text_config()
    tokens = np.setdiff1d(np.arange(min(5, text.vocab_size // 2), text.vocab_size), [*_find_configured_tokens(config)])
    if len(tokens) < 2:
        raise InputError(
            f"vocab_size = {text.vocab_size}: the vocabulary must contain at least two tokens that are not special"
        )
    return tokens


def _find_configured_tokens(config: transformers.PretrainedConfig) -> set[int]:
    """Return the token ids that a config assigns to settings such as `pad_token_id`."""
    configs = (config, config.get_text_config())
    return {value for each in configs for name, value in vars(each).items() if "token" in name and isinstance(value, int)}


def compute_outputs_without_packing(
    model: transformers.PreTrainedModel, pack_inputs: PackInputs, rows: Sequence[Pack]
) -> list[torch.Tensor]:
    """Run a model on every sequence of the given packs separately, without mask or positions, and return the outputs."""
    outputs = []
    for row in rows:
        for number in range(1, len(row["seq_lens"]) + 1):
            chosen = row["sequence_ids"] == number
            inputs = {"input_ids": row["input_ids"][chosen]}
            if pack_inputs.takes_token_types:
                inputs["token_type_ids"] = row["token_type_ids"][chosen]
            outputs.append(
                compute_token_outputs(model, {name: torch.tensor(values)[None] for name, values in inputs.items()})[0]
            )
    return outputs


def compute_token_outputs(model: transformers.PreTrainedModel, batch: dict[str, Any]) -> torch.Tensor:
    """Run a model on a batch, and return one output per token, float32 [B, L, H], on the CPU.

    Raises:
        InputError: The model fails, or does not return one vector per token.
    """
    weights = next(model.parameters())
    inputs = move_to_device(batch, weights.device, weights.dtype)
    try:
        output = extract_logits_or_hidden_states(model(**inputs))
    except MODEL_ERRORS as error:
        tokens = batch["input_ids"].shape[-1]
        raise InputError(f"the model fails on rows of {tokens} tokens with {' and '.join(batch)}") from error
    if not isinstance(output, torch.Tensor) or output.ndim != 3 or output.shape[:2] != batch["input_ids"].shape:
        raise InputError(f"{type(model).__name__}: expected one output vector per token; pass an encoder or a causal model")
    return output.float().cpu()


def extract_logits_or_hidden_states(model_output: Any) -> Any:
    """Return the logits or, if there are none, the hidden states of all tokens from the output object of a model.

    They are selected by name, because the first element of an output may be something else, such as Mixtral's router loss.
    """
    named = (getattr(model_output, name, None) for name in ("logits", "last_hidden_state"))
    return next((value for value in named if value is not None), model_output[0])


def move_to_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move a batch, or a value in a batch, to a device. If `dtype` is given, also convert floating-point tensors to it."""
    if isinstance(value, dict):
        return {name: move_to_device(each, device, dtype) for name, each in value.items()}
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(device, dtype)
    return value.to(device) if hasattr(value, "to") else value


def split_by_sequence(outputs: torch.Tensor, rows: Sequence[Pack]) -> list[torch.Tensor]:
    """Split the outputs of packs into one tensor per sequence, without padding.

    Args:
        outputs: The outputs of the packs, [B, L, H], or of all sequences in one flattened row, [1, T, H].
        rows: The packs.
    """
    lengths = [row["seq_lens"].tolist() for row in rows]
    if outputs.shape[0] == 1:
        return list(outputs[0].split([length for row in lengths for length in row]))
    return [part for output, row in zip(outputs, lengths, strict=True) for part in output[: sum(row)].split(row)]


def largest_difference(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest absolute difference between two lists of outputs, or NaN if one of them contains NaN."""
    return float(torch.stack([(one - other).abs().max() for one, other in zip(actual, expected, strict=True)]).max())


def compute_largest_neighbour_change(
    outputs_before: Sequence[torch.Tensor], outputs_after: Sequence[torch.Tensor], rows: Sequence[Pack]
) -> float:
    """Return how much the outputs of sequences changed when the tokens of the first sequence in their pack were changed.

    The result is the largest absolute change. The first sequence of each pack is left out, because its outputs have to
    change.

    Args:
        outputs_before: The outputs of all sequences before the change.
        outputs_after: The outputs of all sequences after the change.
        rows: The packs.
    """
    others = np.flatnonzero([number > 0 for row in rows for number in range(len(row["seq_lens"]))])
    return largest_difference([outputs_before[each] for each in others], [outputs_after[each] for each in others])


def compute_max_abs_output_or_one(outputs: Sequence[torch.Tensor]) -> float:
    """Return the largest absolute output, or 1 if that is larger."""
    return max(1.0, *(float(output.abs().max()) for output in outputs))


# --- Small copies of models

_MAX_PARAMETERS = 2e8
_HEADS = 4
_WINDOW_NAME = re.compile(r"^(?!.*layer).*(window|local_attention|chunk|block_size|index_\w*topk|topk_blocks)")
_WIDTH_NAME = re.compile(r"size|dim|^d_|n_embd")
# Some models repeat a pattern of different layers, such as one global layer after every five local layers. Settings with one
# of these words in their names may contain the length of the pattern.
_PERIOD = re.compile(r"every_n|pattern|interval|period|freq")
# Packs are tried on a small copy of a model. To make the copy small, each setting with a name that matches one of these
# patterns is limited to the value after the pattern. These settings do not affect how the model processes packs.
_MAX_SETTINGS = (
    (re.compile(r"vocab_size"), 211),
    (re.compile(r"intermediate_size|ffn|ff_dim|n_inner|mlp_dim|moe_dim|expert_(hidden|dim)"), 48),
    (re.compile(r"experts?_per_tok|top_?k(_experts|_routing)?$|selected_experts|moe_k$"), 2),
    (re.compile(r"(num|n|moe)_\w*experts?$"), 4),
    (re.compile(r"(n|topk)_group$|first_k_dense|num_dense_layers"), 1),
    (re.compile(r"lora_rank$|lora_r$"), 16),
    (re.compile(r"kv_shared_layers$"), 0),
)


def _iterate_nested_configs(config: transformers.PretrainedConfig) -> Iterator[Any]:
    """Yield a config and all configs that are nested in it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, transformers.PretrainedConfig):
            yield from _iterate_nested_configs(value)


def _copy_config_with_fewer_layers(config: transformers.PretrainedConfig, max_window: int) -> Any:
    """Return a copy of a config with shorter attention windows and fewer layers. Every kind of layer is kept."""
    small = copy.deepcopy(config)
    for each in _iterate_nested_configs(small):
        for name, value in list(vars(each).items()):
            numbers = value if isinstance(value, list) else [value]
            if _WINDOW_NAME.search(name) and numbers and all(type(one) is int and one > 1 for one in numbers):
                short = [min(one, max_window) for one in numbers]
                setattr(each, name, short if isinstance(value, list) else short[0])
        layers = getattr(each, "num_hidden_layers", None)
        if not isinstance(layers, int):
            continue
        kinds = list(getattr(each, "layer_types", None) or [])
        periods = [value for name, value in vars(each).items() if _PERIOD.search(name) and type(value) is int]
        fewer = max([2, *(kinds.index(kind) + 1 for kind in set(kinds)), *(each for each in periods if each <= layers)])
        if fewer >= layers:
            continue
        for name, value in list(vars(each).items()):
            if isinstance(value, list | tuple) and len(value) == layers:
                vars(each)[name] = value[:fewer]
        with suppress(NotImplementedError):  # some types derive their number of layers from blocks
            each.num_hidden_layers = fewer
    return small


def _copy_config_with_smaller_layers(config: transformers.PretrainedConfig, max_window: int) -> Any:
    """Return a copy of a config with fewer and smaller layers. Layers have at most 4 attention heads of unchanged size."""
    small = _copy_config_with_fewer_layers(config, max_window)
    for each in _iterate_nested_configs(small):
        heads, hidden = (getattr(each, name, None) for name in ("num_attention_heads", "hidden_size"))
        if type(heads) is int and type(hidden) is int and heads > _HEADS and hidden % heads == 0:
            width = vars(each).get("head_dim")
            for name, value in list(vars(each).items()):
                if _WIDTH_NAME.search(name) and type(value) is int and value == hidden:
                    setattr(each, name, _HEADS * (width or hidden // heads))
            each.num_attention_heads = _HEADS
            _limit_settings(each, re.compile(r"attention_heads$|key_value_heads$"), _HEADS)
        for names, most in _MAX_SETTINGS:
            _limit_settings(each, names, most)
        vocabulary = getattr(each, "vocab_size", None)
        for name, value in list(vars(each).items()):
            if name.endswith("_token_id") and type(value) is int and type(vocabulary) is int and value >= vocabulary:
                setattr(each, name, value % 4)
    return small


def _limit_settings(config: transformers.PretrainedConfig, name_pattern: re.Pattern[str], max_value: int) -> None:
    """Set integers in a config to `max_value` if they are larger and the name of the setting matches `name_pattern`. In
    lists, each element is limited.
    """
    for name, value in list(vars(config).items()):
        if name_pattern.search(name) and type(value) is int and value > max_value:
            setattr(config, name, max_value)
        elif name_pattern.search(name) and isinstance(value, list) and all(type(one) is int for one in value):
            setattr(config, name, [min(one, max_value) for one in value])


def build_small_copy(
    config: transformers.PretrainedConfig, model_class: type[Any] | None = None, max_window: int = 8
) -> Any:
    """Build a small copy of a model with the same kinds of layers, but without the head, and return it in evaluation mode.

    If the model cannot be built with smaller layers, only the number of layers is reduced.

    Args:
        config: The config of the model.
        model_class: The class of the model. None for the encoder class of the config.
        max_window: The maximum size of attention windows in the copy, in tokens.

    Raises:
        InputError: No copy can be built, or the smallest copy is too large.
    """
    reasons = []
    for shrink in (_copy_config_with_smaller_layers, _copy_config_with_fewer_layers):
        try:
            small = shrink(config, max_window)
            software = getattr(config, "_attn_implementation", None)
            small._attn_implementation = software if software in ("eager", "sdpa") else None  # noqa: SLF001 - set nowhere else
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in _build_model(small, model_class).parameters())
            if size > _MAX_PARAMETERS:
                reasons.append(f"the smallest copy has {size:,} parameters")
                continue
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(TRIAL_SEED)
                model = _build_model(small, model_class).float().eval()
                _randomize_weights(model)
        except MODEL_ERRORS as error:
            reasons.append(explain_library_error(error))
        else:
            return model
    raise InputError(
        f"model type {config.model_type!r}: packs cannot be tested, because no small copy of the model can be built "
        f"({reasons[0]})"
    )


def _build_model(config: transformers.PretrainedConfig, model_class: type[Any] | None) -> Any:
    """Build a model and return it without its head. If `model_class` is None, use the encoder class of the config."""
    if model_class is None:
        mapping = (
            transformers.MODEL_MAPPING
            if type(config) in transformers.MODEL_MAPPING
            else transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        )
        classes = mapping[type(config)]
        model_class = classes[0] if isinstance(classes, tuple) else classes
    return model_class._from_config(config).base_model  # noqa: SLF001 - transformers has no public method for this


def _randomize_weights(model: transformers.PreTrainedModel) -> None:
    """Set the trainable weights of a model to random values that are large enough for attention to have an effect.

    Zeros are common initial values, and would hide errors in the values that are multiplied by them.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:  # a fixed table of positions
                continue
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
