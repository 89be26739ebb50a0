"""A sequence is one row of training tokens; a Parquet table holds many of them.

In aligned columns, entry i belongs to token i, given the tokens before it. Nested values are JSON text, so that
pandas, DuckDB and `datasets` can read the file as it is. The same table is used in steps/, rejected/ and evals/,
and in a faster format (`clew.record.inbox`) in the inbox.
"""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clew.errors import RecordError
from clew.reading import DEEPEST, RESTORE, is_deep, read_bytes
from clew.record.files import write_bytes

FORMAT = 4
"""Version of the record's format. A reader refuses a newer one."""
OLDEST = 3
"""Oldest format that is read. It had no chain of commits; nothing older was ever released."""

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("episode_id", pa.string(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.bool_())),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("versions", pa.list_(pa.int32())),
        pa.field("turn_ids", pa.list_(pa.int32())),
        pa.field("temperatures", pa.list_(pa.float32())),
        pa.field("reward", pa.float64()),
        pa.field("rewards", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("data", pa.string()),
        pa.field("interactions", pa.string()),
        pa.field("images", pa.list_(pa.string())),
        pa.field("error", pa.string()),
        pa.field("admitted_version", pa.int32()),
        pa.field("admitted_at", pa.float64()),
        pa.field("started_at", pa.float64()),
        pa.field("finished_at", pa.float64()),
        pa.field("consumed_at", pa.float64()),
    ],
    metadata={"clew_format": str(FORMAT)},
)

OPTIONAL = pa.schema(
    [
        pa.field("sampling_mask_counts", pa.list_(pa.int32())),
        pa.field("sampling_mask_ids", pa.list_(pa.int32())),
        pa.field("sampled_by", pa.string()),
        pa.field("routed_experts", pa.binary()),
    ]
)
"""Columns that only some engines report. A table leaves out those in which no row has a value."""
COLUMNS = (*SCHEMA.names, *OPTIONAL.names)

ALIGNED = {
    "input_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "turn_ids": np.int32,
    "temperatures": np.float32,
}
MASKS = ("sampling_mask_counts", "sampling_mask_ids")
"""Columns with the tokens that could be drawn under top_p, top_k and min_p."""
TIMES = ("admitted_version", "admitted_at", "started_at", "finished_at", "consumed_at")
"""Fields of a sequence and its interactions that differ each time the same sequence is computed."""
_ALIGNED = attrgetter(*ALIGNED)
_NESTED = ("rewards", "data", "interactions")
ENCODER = json.JSONEncoder(default=str)
"""Encoder that writes ASCII: a lone surrogate, which UTF-8 cannot hold, survives as an escape."""
DECODER = json.JSONDecoder()


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """One row of training tokens (T of them), or the trace of an episode that failed (T = 0, `error` says why)."""

    id: str
    group_id: str
    episode_id: str
    input_ids: np.ndarray
    """[T] int32"""
    loss_mask: np.ndarray
    """[T] bool: the tokens that the model generated and that are trained on in this sequence."""
    logprobs: np.ndarray
    """[T] float32, nats: behaviour logprob; 0 where not generated."""
    versions: np.ndarray
    """[T] int32: version of the weights that sampled the token; -1 where not generated."""
    turn_ids: np.ndarray
    """[T] int32: index of the interaction that generated the token; -1 where not generated."""
    temperatures: np.ndarray
    """[T] float32: what the logits are divided by when the token is scored; 1 where not generated or greedy."""
    reward: float
    """Reward that is trained on (the sum of `rewards`); NaN if the episode failed."""
    rewards: dict[str, float] = field(default_factory=dict)
    finish_reason: str = ""
    """Finish reason of the last interaction: stop or length; "error" if the episode failed."""
    data: dict[str, Any] = field(default_factory=dict)
    """Row of the data set that the prompt comes from."""
    interactions: list[dict[str, Any]] = field(default_factory=list)
    """Interactions of this sequence, each with messages or text, sampling parameters, seed and times."""
    images: list[str] = field(default_factory=list)
    """Names of the image files in media/ that the model was shown, in the order of their tokens."""
    sampling_mask_counts: np.ndarray | None = None
    """[T] int32: number of tokens that this one was drawn from; 0: all. `logprobs` are renormalised over these tokens.

    None if nothing was cut, or if the engine does not say what it cut.
    """
    sampling_mask_ids: np.ndarray | None = None
    """[sum of sampling_mask_counts] int32: IDs of these tokens, token by token."""
    sampled_by: list[dict[str, Any]] | None = None
    """Spans of generated tokens as the engine reports them: start, end, the server's name, its label of the weights."""
    routed_experts: np.ndarray | None = None
    """[T - 1, layers, experts of a token]: experts that the engine sent each token to, except the last."""
    error: str | None = None
    admitted_version: int = 0
    """Published version when the group was admitted."""
    admitted_at: float = 0.0
    """Seconds since the epoch, as are the next three fields."""
    started_at: float = 0.0
    finished_at: float = 0.0
    consumed_at: float | None = None

    def __post_init__(self) -> None:
        lengths = list(map(len, _ALIGNED(self)))
        assert len(set(lengths)) == 1, (
            f"{self.id}: columns of different length: {dict(zip(ALIGNED, lengths, strict=True))}"
        )
        if self.sampling_mask_counts is not None and self.sampling_mask_ids is not None:
            counts, ids = self.sampling_mask_counts, self.sampling_mask_ids
            assert (len(counts), counts.sum()) == (lengths[0], len(ids)), f"{self.id}: sampling mask of another length"


_FIELDS = attrgetter(*SCHEMA.names)


def by_episode(sequences: Iterable[Sequence]) -> dict[str, list[Sequence]]:
    """Return the sequences of each episode, by its ID, in the order in which they came."""
    found: dict[str, list[Sequence]] = {}
    for sequence in sequences:
        found.setdefault(sequence.episode_id, []).append(sequence)
    return found


def parse_data(cell: Any) -> dict[str, Any]:
    """Return the data row in a cell of a table; empty if it is not a JSON object, as in an altered file."""
    try:
        row = json.loads(cell)
    except (TypeError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}


def timeless(interaction: Any) -> Any:
    """Return an interaction without its times; unchanged if it is no object, as may be in another trainer's record."""
    if not isinstance(interaction, dict):
        return interaction
    return {key: value for key, value in interaction.items() if key not in TIMES}


def to_table(sequences: SequenceABC[Sequence]) -> pa.Table:
    columns: list[pa.Array] = []
    # without sequences each column is empty, and `repeat` has no end: the zip below is not strict
    by_name = zip(*map(_FIELDS, sequences), strict=True) if sequences else itertools.repeat(())
    offsets = pa.array(np.cumsum([0, *(len(sequence.input_ids) for sequence in sequences)], dtype=np.int32))
    for column, values in zip(SCHEMA, by_name, strict=False):
        if column.name in ALIGNED:
            dtype = ALIGNED[column.name]
            flat = np.concatenate(values, dtype=dtype, casting="unsafe") if values else np.empty(0, dtype)
            columns.append(pa.ListArray.from_arrays(offsets, pa.array(flat, column.type.value_type)))
        elif column.name in _NESTED:
            columns.append(pa.array([ENCODER.encode(value) for value in values]))
        elif column.name in ("error", "finish_reason"):  # text of other programs: may hold what UTF-8 cannot
            clean = [value and value.encode(errors="replace").decode() for value in values]
            columns.append(pa.array(clean, pa.string()))
        else:
            columns.append(pa.array(values, column.type))
    table = pa.Table.from_arrays(columns, schema=SCHEMA)
    for column in OPTIONAL:
        if any(getattr(sequence, column.name) is not None for sequence in sequences):
            encode = _ENCODED.get(column.name, lambda value: value)
            values = [None if value is None else encode(value) for value in map(attrgetter(column.name), sequences)]
            table = table.append_column(column, pa.array(values, column.type))
    return table


def concatenated(tables: Iterable[pa.Table]) -> pa.Table:
    """Return the rows of several tables. Some of them may have optional columns that others leave out."""
    return pa.concat_tables(tables, promote_options="default")


def _to_npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


_ENCODED: dict[str, Callable[[Any], Any]] = {"sampled_by": ENCODER.encode, "routed_experts": _to_npy}
_DECODED: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(MASKS, lambda ids: np.array(ids, np.int32)),
    "sampled_by": DECODER.decode,
    "routed_experts": lambda content: np.load(io.BytesIO(content), allow_pickle=False),
}


def from_table(table: pa.Table) -> list[Sequence]:
    """Return the rows of a table that `read_table` returned.

    Columns of a later, compatible format are ignored. Fields that the table has no column for keep their defaults.
    """
    aligned = {name: split_lists(table.column(name), dtype) for name, dtype in ALIGNED.items()}
    named = [name for name in SCHEMA.names if name in table.column_names and name not in (*ALIGNED, "images")]
    plain = {name: table.column(name).to_pylist() for name in named}
    nested = {name: DECODER.decode(f"[{','.join(plain[name])}]") for name in _NESTED if name in plain}  # at once
    columns = {**plain, **nested, **aligned, "images": images_of(table)}
    for name in (name for name in OPTIONAL.names if name in table.column_names):
        decode = _DECODED[name]
        columns[name] = [None if value is None else decode(value) for value in table.column(name).to_pylist()]
    return [Sequence(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def checked(path: Path, table: pa.Table, remedy: str = RESTORE) -> list[Sequence]:
    """Return the rows of a table that was read from `path`, after checking them.

    Raises:
        RecordError: The table has something that Clew never writes: a missing or unaligned column, an empty cell, no
            rows, or the same row twice.
    """
    try:
        found = from_table(table)
        wrong = _wrong_rows(found) or _too_deep(table)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        wrong = _wrong_columns(table) or "its columns do not fit together"
    if wrong:
        raise altered(path, wrong, remedy)
    return found


def _wrong_rows(sequences: SequenceABC[Sequence]) -> str:
    name, count = Counter(row.id for row in sequences).most_common(1)[0] if sequences else ("no row", 1)
    if not sequences or count > 1:
        return f"it holds {name}" + (f" {count} times" if count > 1 else "")
    for row in sequences:
        if row.loss_mask[:1].any():
            return f"the first token of {row.id} is in its loss_mask, but nothing predicts it"
        kinds = {"id": str, "group_id": str, "reward": float, "data": dict, "interactions": list}
        if wrong := [name for name, kind in kinds.items() if not isinstance(getattr(row, name), kind)]:
            return f"{row.id} has an empty place in {wrong[0]}"
        named = row.rewards.values() if isinstance(row.rewards, dict) else [None]
        if any(not isinstance(each, (int, float)) for each in named):
            return f"rewards of {row.id} are no numbers by name: {row.rewards!r:.60}"
        if wrong := wrong_mask(row):
            return f"{row.id} has {wrong}"
    return ""


def wrong_mask(row: Sequence) -> str:
    """Return what is wrong with the sampling mask of a row, for an error; empty if nothing is."""
    counts, ids = row.sampling_mask_counts, row.sampling_mask_ids
    if counts is None or ids is None:
        return "" if counts is ids else f"only one of {' and '.join(MASKS)}"
    if (counts < 0).any():
        return "a negative number in sampling_mask_counts"
    token = np.repeat(np.arange(len(counts)), counts)
    itself = np.bincount(token[ids == row.input_ids[token]], minlength=len(counts))
    wrong = np.flatnonzero(itself != (counts > 0))
    why = "that does not contain the token itself exactly once"
    return f"a sampling mask of token {wrong[0]} {why}" if len(wrong) else ""


def _too_deep(table: pa.Table) -> str:
    """Return which nested column has more than `DEEPEST` levels, as text for an error; empty if none has."""
    for name in (name for name in _NESTED if name in table.column_names):
        for row, text in zip(table.column("id").to_pylist(), table.column(name).to_pylist(), strict=True):
            if text.count("[") + text.count("{") > DEEPEST and is_deep(DECODER.decode(text)):
                return f"{name} of {row} has more than {DEEPEST} objects and lists within one another"
    return ""


def _wrong_columns(table: pa.Table) -> str:
    if missing := [name for name in ("id", *ALIGNED, "rewards", "data") if name not in table.column_names]:
        return f"there is no column {missing[0]!r}"
    lengths = {name: [len(each or ()) for each in table.column(name).to_pylist()] for name in ALIGNED}
    for place, name in itertools.product(range(table.num_rows), ALIGNED):
        if lengths[name][place] != lengths["input_ids"][place]:
            row = table.column("id")[place]
            return f"{row} has {lengths[name][place]} {name} and {lengths['input_ids'][place]} input_ids"
    for name in (name for name in _NESTED if name in table.column_names):
        for row, text in zip(table.column("id"), table.column(name).to_pylist(), strict=True):
            try:
                DECODER.decode(text)
            except (RecursionError, TypeError, ValueError):
                return f"{name} of {row} is no JSON: {text!r:.60}"
    return ""


def images_of(table: pa.Table) -> list[list[str]]:
    return [names or [] for names in table.column("images").to_pylist()]


def split_lists(column: pa.ChunkedArray, dtype: type) -> list[np.ndarray]:
    """Return a column of lists of numbers as one array per row. (pyarrow's to_numpy imports pandas, taking 0.25 s.)"""
    lists = column.combine_chunks()
    values = lists.values.cast(pa.from_numpy_dtype(np.dtype(dtype)))
    bits = values.buffers()[1]
    if bits is None:
        flat = np.empty(0, dtype)
    elif dtype is np.bool_:
        flat = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)
    else:
        flat = np.frombuffer(bits, dtype)
    # A slice of a table shares the buffers of the whole table.
    flat = flat[values.offset : values.offset + len(values)]
    return [flat[first:last] for first, last in itertools.pairwise(lists.offsets.to_pylist())]


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file atomically, without dictionaries and statistics, which cost more than they save here."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        table, sink, compression="zstd", use_dictionary=False, write_statistics=False, write_page_checksum=True
    )
    write_bytes(path, memoryview(sink.getvalue()))


def read_table(path: Path, remedy: str = RESTORE) -> pa.Table:
    """Read a Parquet file and verify its checksums. Raises RecordError, with the `remedy`, if it cannot be read."""
    content = read_bytes(path, remedy)

    def read() -> pa.Table:
        return pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True).read(use_threads=False)

    return sound(path, read, len(content), remedy)


def sound(path: Path, read: Callable[[], pa.Table], size: int, remedy: str) -> pa.Table:
    """Return the table that `read` returns, after checking its columns. The other arguments are for error messages.

    Raises:
        RecordError: The table cannot be read, or lacks columns of its format.
    """
    try:  # the footer has no checksum: an altered one says anything
        table = read()
        table.validate(full=True)
        found, wrong = format_of(table), _strange_column(table)
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise unreadable(path, why, size, remedy) from None
    check_format(path, found)
    if wrong:
        raise altered(path, wrong, remedy)
    return table


def _strange_column(table: pa.Table) -> str:
    """Return which column of a table of sequences is missing or has the wrong type, for an error; empty if none."""
    names, version = set(table.column_names), format_of(table)
    if not names & {"group_id", "input_ids"} or version > FORMAT:  # a table of stages, or one that is refused later
        return ""
    if version < OLDEST:
        return f"it states format {version}; expected {OLDEST} to {FORMAT}"
    if missing := [name for name in SCHEMA.names if name not in names]:
        return f"there is no column {missing[0]!r}"
    for column in (*SCHEMA, *OPTIONAL):
        if column.name in names and table.schema.field(column.name).type != column.type:
            return f"the column {column.name!r} is {table.schema.field(column.name).type}, not {column.type}"
    return ""


def unreadable(path: Path, why: str, size: int, remedy: str) -> RecordError:
    """Return the RecordError for a file of `size` bytes that cannot be read as it was written."""
    return RecordError(
        f"{path} cannot be read ({why}); it has {size} bytes. It was truncated or altered after it was written: "
        f"{remedy}."
    )


def altered(path: Path, wrong: str, remedy: str = RESTORE) -> RecordError:
    """Return the RecordError for a file with content that Clew never writes."""
    return RecordError(f"{path} was altered after it was written: {wrong}. {remedy.capitalize()}.")


def format_of(table: pa.Table) -> int:
    """Return the format version that a table states; 0 if it states none."""
    return int((table.schema.metadata or {}).get(b"clew_format", b"0"))


def check_format(path: Path, found: Any, newest: int = FORMAT) -> None:
    """Raise RecordError if `path` is of a newer format than this Clew reads, or its format is not a number."""
    if not isinstance(found, int):
        raise RecordError(
            f"{path} is of format {found!r:.60}: it was altered after it was written. {RESTORE.capitalize()}."
        )
    if found > newest:
        raise RecordError(f"{path} is of format {found}; this Clew reads formats up to {newest}. Upgrade Clew.")
