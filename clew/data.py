"""The user's data set: rows as dictionaries, and the order in which a run goes through them.

Local JSON-lines and Parquet files are read directly; `datasets` is imported only for what it alone can read (a hub
name, or a folder in its layout).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clew.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from clew.config import Config

MESSAGES = "messages"
"""Column of conversations in many data sets, used if data.prompt has its default and that column does not exist."""

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet", ".pq")
_HALF_PAIR = re.compile(rb"\\u[dD]|\xed")
"""Matches the bytes of each line that has a surrogate, and of some other lines."""
LOCAL = _JSON_LINES + _PARQUET
"""Suffixes of the files that are read directly."""


def load_rows(path: str, *, split: str = "train", limit: int | None = None, columns: Sequence[str] = ()) -> list[dict]:
    """Return the first `limit` rows (None: all) of a JSON-lines file, a Parquet file, or a data set for `datasets`.

    Args:
        split: Split of a hub data set; files have none.
        columns: Columns that every row must have.

    Raises:
        DataError: There is no such file, it cannot be read, it has no rows, or a column is missing. The message names
            the nearest column that exists.
    """
    suffix = Path(path).suffix.lower()
    if suffix in _JSON_LINES:
        rows = list(islice(_read_json_lines(_existing(path)), limit))
    elif suffix in _PARQUET:
        rows = list(islice(_read_parquet(_existing(path)), limit))
    else:
        rows = list(islice(_read_with_datasets(path, split), limit))
    if not rows:
        raise DataError(f"Cannot use {path}: it holds no rows. Write at least one into it, or name another data set.")
    for number, row in enumerate(rows, start=1):
        _check_columns(path, number, row, columns)
    return rows


def load_demonstrations(config: Config, path: str, *, limit: int | None) -> list[dict]:
    """Return the rows of a file or data set that `clew sft` trains on, as `load_rows` does.

    Each row has a prompt and a completion (for preferences, also a rejected one), or is a whole conversation.

    Raises:
        DataError: See `load_rows`; or training.objective compares completions, and a row is a conversation.
    """
    names, objective = config.data, config.training.objective
    columns = [names.prompt, names.completion, *([names.rejected] if objective != "sft" else [])]
    rows = load_rows(path, split=names.split, limit=limit)
    default = type(names).model_fields["completion"].default
    if names.completion != default and not any(names.completion in row for row in rows):
        _check_columns(path, 1, rows[0], [names.completion])
    for number, row in enumerate(rows, start=1):
        conversation = conversation_column(row, config)
        if conversation is not None and objective != "sft":
            raise DataError(
                f"{path}: row {number} is a conversation (column {conversation!r}), and training.objective={objective} "
                f"compares two completions of a prompt, in the columns {names.completion!r} and {names.rejected!r}. "
                f"Add them, or use training.objective=sft."
            )
        if conversation is None:
            _check_columns(path, number, row, columns)
    return rows


def conversation_column(row: dict, config: Config) -> str | None:
    """Return the column of a row that holds a conversation; None if the row is a prompt and its completion.

    The column is that of data.prompt; or `messages`, if data.prompt has its default and the row has no such column. A
    row with a completion is no conversation: the messages are its prompt.
    """
    # Compared by value: a run's config.yaml spells out defaults, so an unset field cannot be told from a default.
    default = type(config.data).model_fields["prompt"].default
    column = MESSAGES if config.data.prompt == default and default not in row else config.data.prompt
    alone = row.get(config.data.completion) is None and isinstance(row.get(column), list)
    return column if alone else None


def without_nulls(messages: list[Any]) -> list[Any]:
    """Return chat messages without empty fields: templates ask which there are.

    Parquet gives every message, and every part of its content, all fields that any of them has, filled with null.
    """

    def given(fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None or name == "content"}

    cleaned = [given(message) for message in messages]
    for message in cleaned:
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            message["content"] = [given(part) for part in message["content"]]
    return cleaned


def order(n_rows: int, index: int, seed: int) -> int:
    """Return the index of the row that a run takes as its prompt number `index` (from 0).

    Every epoch goes through all rows once, in a permutation that depends only on (seed, epoch).
    """
    epoch, position = divmod(index, n_rows)
    return int(_permutation(n_rows, epoch, seed)[position])


@lru_cache(maxsize=4)
def _permutation(n_rows: int, epoch: int, seed: int) -> np.ndarray:
    """Return the permutation of an epoch, [n_rows] int."""
    # NumPy promises that raw bits never change; its shuffles may.
    bits: Any = np.random.PCG64([seed, epoch]).random_raw(n_rows)
    return np.argsort(bits, kind="stable")


def _existing(path: str) -> Path:
    file = Path(path).expanduser()
    if file.is_file():
        return file
    if file.is_dir():  # as Spark writes Parquet
        raise DataError(
            f"Cannot read the data file {path}: it is a folder. Name one of the files in it, or give the folder a name "
            f"without {file.suffix}, and `datasets` reads all of them."
        )
    folder = file.parent
    if not folder.is_dir():
        raise DataError(f"Cannot read the data file {path}: its folder {folder} does not exist.")
    near = difflib.get_close_matches(file.name, [entry.name for entry in folder.iterdir()], n=1)
    hint = f" Did you mean {folder / near[0]}?" if near else ""
    raise DataError(f"Cannot read the data file {path}: it does not exist.{hint}")


def _read_json_lines(file: Path) -> Iterator[dict]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{file}:{number}: this line is not JSON ({error}). A JSON-lines file has one object on each line."
                ) from None
            if not isinstance(row, dict):
                raise DataError(
                    f'{file}:{number}: expected an object such as {{"prompt": …}}, found '
                    f"{type(row).__name__}. A JSON-lines file has one object on each line."
                )
            if _HALF_PAIR.search(line) and re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
                raise DataError(
                    f"{file}:{number}: a text has half a surrogate pair, such as \\ud83d alone, which no tokenizer "
                    "accepts. It is half an emoji, for example of a text that was cut. Remove it, or leave out the row."
                )
            yield row


def _read_parquet(file: Path) -> Iterator[dict]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"Cannot read {file} as Parquet: {str(error).splitlines()[0]}") from None


def _read_with_datasets(path: str, split: str) -> Iterator[dict]:
    import datasets
    from datasets.exceptions import DatasetGenerationError, DatasetsError

    if Path(path).expanduser().is_file():
        raise DataError(f"Cannot read the data file {path}: its name must end with one of {', '.join(LOCAL)}.")
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not Path(path).expanduser().is_dir():
        raise DataError(
            f"Cannot read the data set {path}: it does not exist. data.path takes a file "
            f"({', '.join(LOCAL)}), a folder that `datasets` can load, or a hub name."
        )
    try:
        source = str(Path(path).expanduser()) if looks_local else path
        # Without trust_remote_code, older versions of datasets would ask on the terminal.
        rows: Any = datasets.load_dataset(source, split=split, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:  # RuntimeError: it has a loading script
        # Only the cause of this one says what is wrong, such as columns that do not match.
        reason = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
        raise DataError(f"Cannot load the data set {path}, split {split}: {reason}") from error
    try:
        yield from rows
    except (ImportError, OSError, ValueError, RuntimeError) as error:  # rows are decoded as they are read
        raise DataError(f"Cannot read a row of the data set {path}, split {split}: {error}") from error


def _check_columns(path: str, number: int, row: dict, columns: Sequence[str]) -> None:
    """Raise DataError if a row, numbered from 1, lacks a column."""
    if missing := [column for column in columns if column not in row]:
        raise DataError(
            f"{path}: row {number} has no column {missing[0]!r}; it has {', '.join(map(repr, row)) or 'none'}."
            f"{did_you_mean(missing[0], row)} The configuration's data section names the columns, such as data.prompt."
        )
