"""The stage `tokenize`: turn texts into tables of tokens, with any tokenizer of the `tokenizers` library.

The output folder contains:

- `tokens-KKKKK-of-NNNNN.parquet`: a row for each text, or for each piece of a long text, in the order of the texts.
- `__gaudi_bert__/settings.json`: the settings and inputs, written first.
- `__gaudi_bert__/tokens-KKKKK-of-NNNNN.json`: a summary of each part.
- `__gaudi_bert__/tokens.json`: the result, written last.
- the tokenizer, in `__gaudi_bert__`, which `pack` copies to the packs.

A part depends only on the text and the settings. Shard K of N writes the parts K, K + N, ..., and the shard that ends last
writes tokens.json. Only a few batches and the longest text are in memory at a time, regardless of the size of the data.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

from gaudi_bert import __version__
from gaudi_bert.artefacts.base import NOTES_NAME, TooLongRows, VocabularyInfo
from gaudi_bert.artefacts.completion import GroupedOutput, Signature
from gaudi_bert.artefacts.examples import TextInput, TokenisedPart, TokenisedTexts, token_table_path
from gaudi_bert.artefacts.mirrored_folder import (
    format_path,
    is_mirrored,
    mirror_folder,
    open_local_copies,
    remove_local_copies,
)
from gaudi_bert.artefacts.results import PlainResult, StageOutput, StageRun
from gaudi_bert.common.arrow import require_pyarrow
from gaudi_bert.common.errors import InputError, require_libraries
from gaudi_bert.common.files import atomic_file, check_path_to_write
from gaudi_bert.common.progress import Task, format_count
from gaudi_bert.config.sections import TokenizeSettings
from gaudi_bert.corpus.documents import Source, compute_source_identity, find_sources
from gaudi_bert.rows.parts import RowPart, split_source
from gaudi_bert.rows.reading import SkippedRows, batch_by_size, raise_or_skip_bad_rows, read_part
from gaudi_bert.rows.tokenizer import RowTokenizer, clone_tokenizer, read_tokenizer, save_tokenizer
from gaudi_bert.rows.types import STANDARD_INPUT, TextRow, format_input_name
from gaudi_bert.tables.sources import TOKENS_COLUMN

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_Text: TypeAlias = str | tuple[str, str]

_SEGMENTS_COLUMN = "token_type_ids"
_BATCH_CHARACTERS = 1 << 19
_BATCH_TEXTS = 1 << 12
_BATCHES_AHEAD = 2
_ROW_GROUP_TOKENS = 1 << 20
_COUNTED, _LOST = ("texts", "empty_texts", "rows", "tokens"), ("dropped_rows", "dropped_tokens", "added_sequences")


class _TokensOutput(GroupedOutput[int, TokenisedPart]):
    """The output folder of `tokenize`, which contains a table for each part of the texts."""

    def is_group_complete(self, summary: TokenisedPart) -> bool:
        """Return whether the table of a part exists with the size that its summary states. In an object store, the size is
        not checked, because a table is uploaded before its summary.
        """
        path = self.folder / summary.name
        return is_mirrored(self.folder) or (path.is_file() and path.stat().st_size == summary.bytes)


def tokenize_texts(
    texts: Sequence[str],
    tokenizer: str | Path,
    out: Path,
    settings: TokenizeSettings,
    run: StageRun,
) -> StageOutput[TokenisedTexts] | PlainResult:
    """Tokenize texts, and write their tokens into tables in a folder.

    Args:
        texts: Files, folders or globs of text, or the name of a built-in text, or only `-` for standard input.
        tokenizer: A tokenizer.json, or a folder that contains one or a vocab.txt.
        out: The folder of the tables.
        settings: The settings.
        run: How the stage runs: its part, and what is reported.

    Returns:
        The content of tokens.json. If parts remain for other shards, their number instead.

    Raises:
        InputError: There is no text, a text cannot be read, or it is too long under the policy "error".
    """
    require_libraries(["pyarrow", "tokenizers"], "tokenize")
    check_path_to_write(out)
    with open_local_copies([*texts, tokenizer], run.store) as copies, mirror_folder(out, run.store) as folder:
        *files, model = [str(copy) for copy in copies]
        library = read_tokenizer(Path(model))
        with _open_sources(files) as sources:
            return _tokenize_sources(sources, library, folder, settings, run)


@contextmanager
def _open_sources(texts: Sequence[str]) -> Iterator[list[Source]]:
    """Open a context that provides the text files, including a temporary copy of standard input.

    Standard input is copied, because its size and checksum are needed before it is tokenized.
    """
    if STANDARD_INPUT not in texts:
        yield find_sources(texts, Path())
        return
    if len(texts) > 1:
        raise InputError(f"{STANDARD_INPUT}: standard input cannot be combined with other texts; pass only {STANDARD_INPUT}")
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / format_input_name(STANDARD_INPUT)
        with path.open("wb") as handle:
            copyfileobj(sys.stdin.buffer, handle)
        yield [Source(path.name, path, path.stat().st_size)]


def _tokenize_sources(
    sources: Sequence[Source],
    tokenizer: RowTokenizer,
    out: Path,
    settings: TokenizeSettings,
    run: StageRun,
) -> StageOutput[TokenisedTexts] | PlainResult:
    """Tokenize the parts of the texts that are assigned to this run and not yet complete. Write tokens.json if all parts are
    complete.
    """
    encoder = _Encoder(tokenizer, settings)
    identities = [compute_source_identity(source) for source in sources]
    parts = [part for source in sources for part in split_source(source, settings.row_reading_settings, settings.part_bytes)]
    if not parts:
        raise InputError(
            f"{', '.join(source.display_name for source in sources)}: the input contains no text; check the path"
        )
    for part in parts:  # reject a file that does not match the options before the first file is tokenized
        if not part.start:
            say, reading = run.reporter.say if part is parts[0] else None, settings.row_reading_settings
            next(raise_or_skip_bad_rows(read_part(part, None, reading, say=say), reading.on_bad_row), None)

    output = _TokensOutput(
        out,
        TokenisedTexts.json_path_in(out),
        Signature("tokenize", settings.to_json_fields(), {"text": identities, "tokenizer": {"sha256": tokenizer.sha256}}),
        TokenisedPart,
        lambda number: token_table_path(out / NOTES_NAME, number, len(parts)).with_suffix(".json"),
        run.reporter,
    )
    if output.begin_unless_finished(run.overwrite):
        return StageOutput(TokenisedTexts.read(out), skipped=True)
    own = output.find_missing_groups(run.select_items_of_this_run(range(len(parts))))
    with output.remove_files_on_bad_input() if run.part is None else nullcontext():
        with run.reporter.task("tokenize", sum(parts[number].size_bytes for number in own), "bytes") as task:
            for number in own:
                # Another process may have written the part in the meantime, so check again under the lock. Write the summary
                # last, because it marks the part as complete.
                with output.lock_group(number, f"{out}: part {number}") as needed:
                    if needed:
                        _write_part(parts[number], token_table_path(out, number, len(parts)), encoder, output, task).write(
                            output.summary_path(number)
                        )
        return _write_summary(len(parts), tokenizer, encoder, output, identities)


def _write_summary(
    part_count: int,
    tokenizer: RowTokenizer,
    encoder: _Encoder,
    output: _TokensOutput,
    identities: Sequence[dict[str, Any]],
) -> StageOutput[TokenisedTexts] | PlainResult:
    """If all parts are complete, write tokens.json and the tokenizer. Otherwise return the number of remaining parts."""
    files = tuple(file for _, file in output.read_complete_groups(range(part_count)))
    missing = part_count - len(files)
    if missing:
        output.reporter.say(f"{format_path(output.folder)}: {missing} of {part_count} parts remain for other shards")
        return PlainResult(
            [f"{missing} of {format_count(part_count, 'part')} remain for other shards"],
            {"parts": part_count, "missing_parts": missing},
        )
    settings = encoder.settings
    if not any(file.rows for file in files):
        raise InputError(
            f"{format_path(output.folder)}: every text is empty or too long, so there are no rows; pass other texts, or "
            "change --too-long"
        )
    content = TokenisedTexts(
        tool_version=__version__,
        tokenizer=VocabularyInfo(size=tokenizer.vocabulary_size, sha256=tokenizer.sha256),
        **settings.model_dump(include={"max_sequence_length", "special_tokens", "text_column"}),
        columns=encoder.columns,
        **{name: sum(getattr(file, name) for file in files) for name in _COUNTED},
        too_long=TooLongRows(
            policy=settings.too_long,
            **{name: sum(getattr(file.too_long, name) for file in files) for name in ("rows", *_LOST)},
        ),
        inputs=tuple(TextInput(**identity) for identity in identities),
        files=files,
    )
    save_tokenizer(tokenizer, output.final.parent)
    content.write(output.final)
    return StageOutput(content)


def _write_part(part: RowPart, path: Path, encoder: _Encoder, output: _TokensOutput, task: Task) -> TokenisedPart:
    """Tokenize a part of the texts, write its table, and return its summary."""
    counts: Counter[str] = Counter()
    size = _write_tables(path, encoder.columns, _tokenize_part(part, encoder, task, counts, output.reporter.say))
    remove_local_copies(path)
    too_long = TooLongRows(
        policy=encoder.settings.too_long, rows=counts["too_long"], **{name: counts[name] for name in _LOST}
    )
    return TokenisedPart(name=path.name, bytes=size, too_long=too_long, **{name: counts[name] for name in _COUNTED})


def _tokenize_part(
    part: RowPart, encoder: _Encoder, task: Task, counts: Counter[str], say: Callable[[str], None]
) -> Iterator[Any]:
    """Tokenize the texts of a part in batches, and yield one table per batch. Add the numbers of rows and tokens to
    `counts`.
    """

    def encode(batch: list[TextRow]) -> tuple[Any, Counter[str], int]:
        """Tokenize a batch of texts. Return a table of its tokens, counts such as the number of empty texts, and the number
        of characters in the batch.
        """
        values, counted = encoder.encode_rows(batch, part)
        return _build_token_table(encoder.columns, values), counted, sum(map(_count_characters, batch))

    characters = 0
    reading, skipped = encoder.settings.row_reading_settings, SkippedRows()
    rows = raise_or_skip_bad_rows(read_part(part, None, reading), reading.on_bad_row, skipped)
    texts = (row for row in rows if isinstance(row, TextRow))
    for table, counted, size in _encode_batches_in_background(
        encode, batch_by_size(texts, _count_characters, _BATCH_CHARACTERS, _BATCH_TEXTS)
    ):
        counts.update(counted)
        # The text of a compressed file may be longer than the file, so report at most the size of the file as progress.
        characters, before = characters + size, characters
        task.advance(min(characters, part.size_bytes) - min(before, part.size_bytes))
        yield table
    task.advance(max(part.size_bytes - characters, 0))
    if skipped.rows:
        say(str(skipped))


def _count_characters(row: TextRow) -> int:
    """Return the number of characters in a text or a pair of texts."""
    return len(row.text) + len(row.text_pair or "")


def _encode_batches_in_background(
    encode: Callable[[list[TextRow]], tuple[Any, Counter[str], int]], batches: Iterator[list[TextRow]]
) -> Iterator[tuple[Any, Counter[str], int]]:
    """Call `encode` for each batch, and yield the results in order. A few batches are encoded ahead on other threads."""
    with ThreadPoolExecutor(_BATCHES_AHEAD) as pool:
        waiting: deque[Future[tuple[Any, Counter[str], int]]] = deque()
        for batch in batches:
            waiting.append(pool.submit(encode, batch))
            if len(waiting) > _BATCHES_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# --- one batch


class _Encoder:
    """Tokenizes texts into rows of limited length, with or without special tokens.

    Args:
        tokenizer: The tokenizer. Its truncation is turned on.
        settings: The settings.

    Attributes:
        columns: The columns of the table: `input_ids`, and `token_type_ids` if they are not always 0.

    Raises:
        InputError: A row has no room for a token beside the special tokens.
    """

    def __init__(self, tokenizer: RowTokenizer, settings: TokenizeSettings) -> None:
        library, special = tokenizer.tokenizer, settings.special_tokens
        with_pairs = settings.text_pair_column is not None
        self.settings = settings
        # The numbers of special tokens in a row with a single text and in a row with a pair.
        self._added = [library.num_special_tokens_to_add(is_pair=pair) if special else 0 for pair in (False, True)]
        least = self._added[with_pairs] + 1
        if settings.max_sequence_length < least:
            raise InputError(
                f"--max-sequence-length {settings.max_sequence_length}: the tokenizer adds {least - 1} special tokens to "
                f"each row, so the value must be at least {least}"
            )
        # If a text is split, the `tokenizers` library sets segment ids only in the first piece. To set them in all pieces,
        # store three values: the segment ids of the special tokens before a text, the segment id of its tokens, and the
        # segment ids after it. None means that all of them are 0.
        self._segments: tuple[list[int], int, list[int]] | None = None
        for letter in "aA1" if tokenizer.has_segments else "":  # the vocabulary may lack some of them
            encoding = library.encode(letter, add_special_tokens=special)
            types, of_text = encoding.type_ids, [at for at, added in enumerate(encoding.special_tokens_mask) if not added]
            if of_text and any(types):
                self._segments = types[: of_text[0]], types[of_text[0]], types[of_text[-1] + 1 :]
                break
        # Truncation removes tokens of pairs, so count the tokens of complete pairs with a copy that does not truncate.
        self._uncut = clone_tokenizer(library) if with_pairs else library
        self._library = library
        # The pieces of a split text must be in order, so split from the beginning, even if the tokenizer truncates on the
        # left.
        side = tokenizer.truncation_side if settings.too_long == "truncate" else "right"
        library.enable_truncation(settings.max_sequence_length, direction=side)
        of_pairs = with_pairs and tokenizer.has_segments and any(self._encode_batch(self._uncut, [("a", "a")])[0].type_ids)
        with_segments = self._segments is not None or of_pairs
        self.columns = (TOKENS_COLUMN, _SEGMENTS_COLUMN) if with_segments else (TOKENS_COLUMN,)

    def _encode_batch(self, library: Tokenizer, texts: list[_Text]) -> Sequence[Encoding]:
        """Tokenize texts with the given tokenizer, and return their encodings in order."""
        encoded: Sequence[Encoding] = library.encode_batch_fast(texts, add_special_tokens=self.settings.special_tokens)
        return encoded

    def encode_rows(self, batch: Sequence[TextRow], part: RowPart) -> tuple[list[list[list[int]]], Counter[str]]:
        """Tokenize a batch of texts. Return the rows of each column, and counts such as the number of empty texts.

        Raises:
            InputError: A text is too long under the policy "error".
        """
        texts = [text for text in batch if not text.text.isspace() and text.text]
        encoded: list[tuple[TextRow, Encoding]] = []
        counts = Counter(texts=len(batch), empty_texts=len(batch) - len(texts))
        for text, encoding in zip(texts, self._encode_batch(self._library, [text.input for text in texts]), strict=True):
            if not encoding.ids:
                counts["empty_texts"] += 1
            elif not encoding.overflowing:
                encoded.append((text, encoding))
            else:
                encoded += [(text, piece) for piece in self._apply_too_long_policy(text, encoding, part, counts)]
        columns = [[encoding.ids for _, encoding in encoded]]
        if len(self.columns) > 1:
            columns.append([self._build_segment_ids(text, encoding) for text, encoding in encoded])
        counts.update(rows=len(encoded), tokens=sum(map(len, columns[0])))
        return columns, counts

    def _build_segment_ids(self, text: TextRow, encoding: Encoding) -> list[int]:
        """Return the segment ids (`token_type_ids`) of one row of tokens."""
        if text.text_pair is not None or self._segments is None:
            return list(encoding.type_ids)
        before, of_text, after = self._segments
        return [*before, *[of_text] * (len(encoding) - len(before) - len(after)), *after]

    def _apply_too_long_policy(
        self, text: TextRow, encoding: Encoding, part: RowPart, counts: Counter[str]
    ) -> list[Encoding]:
        """Truncate, split or drop a text that is longer than a row, update `counts`, and return the remaining rows.

        Raises:
            InputError: The policy is "error", or it is "split" and the text is a pair.
        """
        rest, is_pair, policy = encoding.overflowing, text.text_pair is not None, self.settings.too_long
        added = self._added[is_pair]
        if is_pair:
            tokens = len(self._encode_batch(self._uncut, [text.input])[0])
        else:
            tokens = len(encoding) + sum(len(piece) - added for piece in rest)
        if policy == "error" or (is_pair and policy == "split"):
            choices = "truncate or drop (a pair is not split)" if is_pair else "split, truncate or drop"
            raise InputError(
                f"{part.format_location(text.position)}: expected 1 to {self.settings.max_sequence_length:,} tokens, found "
                f"{tokens:,}; increase --max-sequence-length, or pass --too-long {choices}"
            )
        counts["too_long"] += 1
        if policy == "split":
            counts["added_sequences"] += len(rest)
            return [encoding, *rest]
        if policy == "truncate":
            counts["dropped_tokens"] += tokens - len(encoding)
            return [encoding]
        counts["dropped_tokens"] += tokens - added
        counts["dropped_rows"] += 1
        return []


# --- the table of a part


def _build_token_table(columns: Sequence[str], values: Sequence[Sequence[Sequence[int]]]) -> Any:
    """Return a pyarrow Table with one column of int32 lists for each name in `columns`."""
    pyarrow = require_pyarrow()
    kind = pyarrow.list_(pyarrow.int32())
    return pyarrow.table({name: pyarrow.array(rows, kind) for name, rows in zip(columns, values, strict=True)})


def _write_tables(path: Path, columns: Sequence[str], tables: Iterable[Any]) -> int:
    """Write tables of tokens to one file, and return its size in bytes.

    The file has row groups of about 2^20 tokens, and it appears completely or not at all.
    """
    pyarrow = require_pyarrow()
    from pyarrow import parquet

    options = {
        "compression": "zstd",
        "use_dictionary": False,
        "column_encoding": {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in columns},
    }
    schema = _build_token_table(columns, [[] for _ in columns]).schema
    held: list[Any] = []
    tokens = 0
    with atomic_file(path) as handle, parquet.ParquetWriter(handle, schema, **options) as writer:
        for table in tables:
            held.append(table)
            tokens += len(table.column(0).combine_chunks().values) if table.num_rows else 0
            if tokens >= _ROW_GROUP_TOKENS:
                writer.write_table(pyarrow.concat_tables(held).combine_chunks())
                held, tokens = [], 0
        if tokens:
            writer.write_table(pyarrow.concat_tables(held).combine_chunks())
    return path.stat().st_size
