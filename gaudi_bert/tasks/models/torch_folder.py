"""The folder of any encoder of `transformers`, in PyTorch: its vectors."""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.config.values import Precision
from gaudi_bert.engines.protocol import Engine
from gaudi_bert.model.heads import Pooling
from gaudi_bert.pytorch.encoder import PackedEncoder
from gaudi_bert.pytorch.model_folder import open_encoder
from gaudi_bert.rows.tokenizer import RowTokenizer, open_tokenizer
from gaudi_bert.rows.window_plan import Runner
from gaudi_bert.tasks.models.task_models import folder_identity
from gaudi_bert.training.model_files import tokenizer_length


class TorchFolder:
    """An encoder; its head, if it has one, is not used."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self._device = engine.open_device(TrainingSettings())
        self._path, self._tokenizer = path, open_tokenizer(path)
        self._encoder = self._opened("float32")
        self.hidden_size, self.positions = self._encoder.hidden_size, self._encoder.positions
        self.usual_length = min(self.positions, tokenizer_length(path) or self.positions)
        self.identity = folder_identity(path)

    def _opened(self, precision: Precision) -> PackedEncoder:
        device = self._device.name
        return open_encoder(self._path, self._tokenizer, with_head=False, precision=precision, device=device)

    def _encoder_of(self, precision: Precision) -> PackedEncoder:
        return self._encoder if precision == "float32" else self._opened(precision)

    def check_fits(self, tokenizer: RowTokenizer) -> None:
        """It was seen to fit when the encoder was opened."""

    def embedder(self, pooling: Pooling, normalize: bool, precision: Precision, longest: int) -> Runner:
        """The encoder, its outputs pooled."""
        encoder = self._encoder_of(precision)
        return Runner(
            encoder.plan, lambda sequences, plan, computed: encoder.vectors(sequences, plan, pooling, normalize, computed)
        )
