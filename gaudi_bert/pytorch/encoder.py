"""`PackedEncoder`, which runs any encoder of `transformers` on packs of texts.

The results are in the order of the texts, and equal the results for each text alone. As in `gaudi-bert predict`, the texts
are tokenized, packed and computed in groups of a few thousand. Rows have the lengths of the lowest cost. For a device that
compiles a graph for each shape, all batches have the same static shape instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np
import torch

from gaudi_bert.common.arrays import BatchArrays, Float32Array
from gaudi_bert.common.errors import InputError, short_repr
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.encoders.encoder_weights import read_model_sizes
from gaudi_bert.encoders.pack_inputs_trial import determine_inputs_for_packs
from gaudi_bert.encoders.packed_model import PackedModel, describe_head
from gaudi_bert.encoders.trial import move_to_device
from gaudi_bert.model.heads import Pooling, TaskKind, VectorHead
from gaudi_bert.rows.fields import split_into_words
from gaudi_bert.rows.packs import IncompleteBatch
from gaudi_bert.rows.predictions import predict_classes, predict_entities, predict_labels, predict_values
from gaudi_bert.rows.tokenizer import wrap_tokenizer
from gaudi_bert.rows.tokenizing import tokenize_rows
from gaudi_bert.rows.types import Row, RowPosition, Sequences, TaggedRow, TextRow
from gaudi_bert.rows.window_plan import PackRunner, plan_window

Text = str | tuple[str, str] | list[str]  # a text, a pair of texts, or the words of a text

_WINDOW_TEXTS = 8192
_TOKENS_OF_A_BATCH = 2048


class PackedEncoder:
    """Computes embeddings and predictions for texts with an encoder that runs on packs.

    Example:
        ```python
        encoder = PackedEncoder(AutoModel.from_pretrained("my-model"), AutoTokenizer.from_pretrained("my-model"))
        vectors = encoder.embed(["a text", "another text"], pooling="mean")  # float32 [2, hidden size]
        ```

    Args:
        model: An `AutoModel`, `AutoModelForSequenceClassification` or `AutoModelForTokenClassification` with `sdpa` or
            `eager` attention. It is used on its own device, in evaluation mode.
        tokenizer: The model's tokenizer, of `transformers` or of `tokenizers`.
        max_sequence_length: The maximum number of tokens in a text, including special tokens. Longer texts are truncated. By
            default, the maximum of the model.
        static_shapes: Whether all batches have the same shape, with rows of `max_sequence_length`, as Gaudi requires.

    Raises:
        InputError: The model does not work with packs, or the tokenizer does not belong to the model.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, max_sequence_length: int | None = None, static_shapes: bool = False
    ) -> None:
        self.model, self.static_shapes = model, static_shapes
        software = getattr(getattr(model, "config", None), "_attn_implementation", "not known")
        if software not in ("eager", "sdpa"):
            raise InputError(
                f"{type(model).__name__}: the attention implementation {software} is not supported; open the model with "
                "attn_implementation='sdpa'"
            )
        pack_inputs = determine_inputs_for_packs(model.base_model)
        sizes = read_model_sizes(model.config, pack_inputs)
        self._tokenizer = wrap_tokenizer(tokenizer)
        self._tokenizer.check_fits(sizes.vocab_size, sizes.segments)
        self.positions, self.hidden_size = sizes.positions, sizes.hidden_size
        if max_sequence_length is not None and not 3 <= max_sequence_length <= self.positions:
            raise InputError(
                f"max_sequence_length = {max_sequence_length}: must be between 3 and {self.positions}, the number of "
                "positions of the model"
            )
        usual = min(self.positions, getattr(tokenizer, "model_max_length", self.positions))
        self.max_sequence_length: int = max_sequence_length or usual
        head, self.labels = describe_head(model)
        self.task: TaskKind | None = None if head is None else head.kind
        self._packed = PackedModel(model, pack_inputs, head)
        self._packed.check_packs_if_untried()

    def embed(self, texts: Sequence[Text], pooling: Pooling = "mean", *, normalize: bool = False) -> Float32Array:
        """Compute an embedding vector for each text.

        Args:
            texts: Texts, pairs of texts, or lists of words.
            pooling: How to compute a vector from the tokens of a text: from the first token ("cls"), from the last token
                ("last"), or as the mean or the maximum over all tokens, including special tokens ("mean", "max").
            normalize: Whether to scale every vector to length 1.

        Returns:
            float32 [texts, hidden size], in the order of the texts.

        Raises:
            InputError: `pooling` is unknown, an element is not a text, or an output is not a finite number.
        """
        if pooling not in get_args(Pooling):
            raise InputError(f"pooling = {pooling!r}: must be one of {', '.join(get_args(Pooling))}")
        vectors = partial(self._packed.compute_vectors, head=VectorHead(pooling, normalize))
        parts = [outputs for _, _, outputs in self._iterate_model_outputs(texts, None, vectors, self.hidden_size)]
        return np.concatenate([np.zeros((0, self.hidden_size), np.float32), *parts])

    def predict(self, texts: Sequence[Text]) -> list[dict[str, Any]]:
        """Compute a prediction for each text with the head of the model.

        Args:
            texts: Texts or pairs of texts. For a model that tags words, texts or lists of words.

        Returns:
            One dictionary per text, in the order of the texts and in the format of `gaudi-bert predict`.

        Raises:
            InputError: The model has no supported head, an element is not a text, or an output is not a finite number.
        """
        if self.task is None:
            raise InputError(
                f"{type(self.model).__name__}: the model has no supported head; open it with "
                "AutoModelForSequenceClassification or AutoModelForTokenClassification, or call embed"
            )
        answers: list[dict[str, Any]] = []
        for rows, sequences, logits in self._iterate_model_outputs(
            texts, self.task, self._packed.compute_head_outputs, len(self.labels)
        ):
            if self.task == "token-classification":
                answers += predict_entities(logits, sequences, rows, self.labels)
            elif self.task == "regression":
                answers += predict_values(logits)
            else:
                answers += (predict_classes if self.task == "classification" else predict_labels)(logits, self.labels)
        return answers

    def _iterate_model_outputs(
        self,
        texts: Sequence[Text],
        task: TaskName | None,
        run_model: Callable[[dict[str, torch.Tensor]], torch.Tensor],
        output_width: int,
    ) -> Iterator[tuple[list[Row], Sequences, Float32Array]]:
        """Tokenize the texts, pack them, and run the model on the packs. Process at most `_WINDOW_TEXTS` texts at a time.

        Yields:
            The rows of a window, their tokens, and the outputs of `run_model`, with `output_width` values per sequence or
            token.
        """
        if isinstance(texts, str | bytes):
            raise InputError(f"texts = {short_repr(texts)}: must be a list of texts, not a single text; pass [text]")
        tags = task == "token-classification"
        settings = TaskSettings(name=task or "classification", too_long="window" if tags else "truncate")

        def outputs_of(batch: BatchArrays) -> Float32Array:
            self._packed.check_no_forbidden_token(batch)
            with torch.inference_mode():
                tensors = {name: torch.from_numpy(values) for name, values in batch.items()}
                outputs: Float32Array = run_model(move_to_device(tensors, self._packed.device)).float().cpu().numpy()
            return outputs

        incomplete: IncompleteBatch = "filled" if self.static_shapes else "smaller"
        runner = PackRunner(outputs_of, tags, output_width, _TOKENS_OF_A_BATCH, incomplete)
        for first in range(0, len(texts), _WINDOW_TEXTS):
            rows = [
                _convert_text_to_row(number, text, task)
                for number, text in enumerate(texts[first : first + _WINDOW_TEXTS], first)
            ]
            most = self.max_sequence_length
            sequences = tokenize_rows(
                rows, self._tokenizer, task=task, settings=settings, max_sequence_length=most, file="texts"
            )
            plan = plan_window(
                sequences.lengths,
                hidden_size=self.hidden_size,
                fixed_row_length=most if self.static_shapes else None,
                max_row_length=self.positions,
            )
            self._packed.check_packs_if_untried(max((part.length for part in plan.parts), default=0))
            was_training = self.model.training
            self._packed.train(False)
            try:
                outputs = runner.run(sequences, plan)
            finally:
                self._packed.train(was_training)
            bad = runner.find_non_finite_row(outputs, sequences)
            if bad is not None:
                raise InputError(f"texts[{first + bad}]: the model's outputs are not finite; check its weights")
            yield rows, sequences, outputs


def _convert_text_to_row(number: int, text: Text, task: TaskName | None) -> Row:
    """Convert a text to a row. For a model that tags words, split the text into words.

    Raises:
        InputError: `text` has none of the supported types.
    """
    if task == "token-classification":
        if isinstance(text, str):
            return split_into_words(RowPosition(number), text)
        if isinstance(text, list) and all(isinstance(word, str) for word in text):
            return TaggedRow(RowPosition(number), tuple(text))
    elif isinstance(text, str):
        return TextRow(RowPosition(number), text)
    elif isinstance(text, tuple) and len(text) == 2 and all(isinstance(one, str) for one in text):
        return TextRow(RowPosition(number), text[0], text[1])
    raise InputError(
        f"texts[{number}]: the type {type(text).__name__} is not supported; pass a text, a pair of texts, or a list of "
        "words to tag"
    )
