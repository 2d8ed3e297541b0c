"""verification.json: the result of `verify`, of packed TFRecords and of packed tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from typing_extensions import Self

from gaudi_bert.artefacts.base import Count, Figures
from gaudi_bert.artefacts.completion import first_difference
from gaudi_bert.artefacts.packed import Metadata, TableMetadata, TooLongRows
from gaudi_bert.artefacts.references import NOTES_NAME, VERIFICATION_NAME
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.values import matching


class _Verified(Figures):
    """verification.json: the result of `verify`. It is stored in the verified folder, and only where the proof succeeded."""

    file_name = VERIFICATION_NAME
    remedy = "remove it and verify again"
    only_read: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read_of(cls, path: Path, metadata: Any) -> Self:
        """The verification of a folder with this metadata, which a false one does not go with."""
        stored = cls.read(path)
        only_read = {key: getattr(stored, key) for key in cls.only_read}
        difference = first_difference(stored.as_json(), cls.of(metadata, **only_read).as_json(), "by metadata.json")
        if difference is not None:
            raise InputError(f"{cls.path_in(path)}: {difference}; {cls.remedy}")
        return stored

    @classmethod
    def of(cls, *args: Any, **only_read: Any) -> Self:
        """The verification of a folder with this metadata; `only_read` are the keys that only reading the data tells."""
        raise NotImplementedError


class Verification(_Verified):
    """The verification of packed TFRecords.

    Attributes:
        fingerprint: of all sequences, whatever their order: 16 hexadecimal digits.
    """

    sequences: Count
    tokens: Count
    packs: Count
    shards: Count
    input_files: Count
    fingerprint: Annotated[str, matching("[0-9a-f]{16}", "16 digits from 0 to f")]

    only_read = ("fingerprint",)

    @classmethod
    def of(cls, metadata: Metadata, fingerprint: str) -> Self:
        """The verification of a folder with this metadata; only reading its data tells the fingerprint."""
        return cls(
            sequences=metadata.sequences,
            tokens=metadata.tokens,
            packs=metadata.packs,
            shards=len(metadata.shard_table),
            input_files=metadata.input_files,
            fingerprint=fingerprint,
        )


class TableVerification(_Verified):
    """The verification of packed tables."""

    file_name = f"{NOTES_NAME}/{VERIFICATION_NAME}"

    format: Literal["table"]
    rows: Count
    sequences: Count
    tokens: Count
    packs: Count
    shards: Count
    groups: Count
    columns: tuple[str, ...]
    index_only: bool
    too_long: TooLongRows

    @classmethod
    def of(cls, metadata: TableMetadata) -> Self:
        """The verification of a folder with this metadata: all of it follows."""
        copied = ("format", "rows", "sequences", "tokens", "packs", "index_only", "too_long")
        columns = () if metadata.index_only else (*metadata.aligned_columns, *metadata.scalar_columns)
        counts: dict[str, Any] = {"groups": len(metadata.groups), "shards": len(metadata.shard_table)}
        return cls(**{key: getattr(metadata, key) for key in copied}, **counts, columns=columns)
