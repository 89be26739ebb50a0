"""A table opens unchanged elsewhere, and a file that was altered is refused."""

import json
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clew.errors import RecordError
from clew.record import rows
from clew.record.rows import Sequence


def a_sequence(name: str = "g000001.e0.s0", length: int = 5, **changes: object) -> Sequence:
    random = np.random.default_rng(length)
    values: dict[str, object] = {
        "id": name,
        "group_id": name.split(".")[0],
        "episode_id": name.rsplit(".", 1)[0],
        "input_ids": random.integers(0, 1000, length).astype(np.int32),
        "loss_mask": (random.random(length) < 0.5) & (np.arange(length) > 0),
        "logprobs": random.standard_normal(length).astype(np.float32),
        "versions": random.integers(-1, 5, length).astype(np.int32),
        "turn_ids": random.integers(-1, 2, length).astype(np.int32),
        "temperatures": np.ones(length, np.float32),
        "reward": 0.5,
        "rewards": {"exact": 0.5},
        "finish_reason": "stop",
        "data": {"prompt": "1+1=", "answer": [2]},
        "interactions": [{"id": name.rsplit(".", 1)[0] + ".i0", "seed": 7}],
        "images": ["0123.png", "4567.jpg"] if name.endswith("1") else [],
        "admitted_version": 3,
    }
    return Sequence(**{**values, **changes})  # type: ignore[arg-type]


def same(a: Sequence, b: Sequence) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name), equal_nan=name in ("logprobs", "temperatures"))
        if isinstance(getattr(a, name), np.ndarray)
        else getattr(a, name) == getattr(b, name) or (getattr(a, name) != getattr(a, name))
        for name in rows.SCHEMA.names
    )


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def test_text_that_is_no_utf_8_is_written() -> None:
    odd = "half a \ud83d pair"
    row = a_sequence(data={"prompt": odd}, interactions=[{"completion": odd}], error=odd)
    [back] = rows.from_table(rows.to_table([row]))
    assert back.data == row.data and back.interactions == row.interactions and back.error == "half a ? pair"
    assert rows.from_table(rows.to_table([a_sequence()]))[0].error is None


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.floats(), st.dictionaries(texts, st.floats(-1e9, 1e9)), texts),
        max_size=8,
    )
)
def test_rows_come_back_as_they_went(tmp_path_factory: pytest.TempPathFactory, drawn: list) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.parquet"
    written = [
        a_sequence(f"g{i:06d}.e0.s0", length, reward=reward, rewards=rewards, data={"text": text})
        for i, (length, reward, rewards, text) in enumerate(drawn)
    ]
    rows.write_table(path, rows.to_table(written))
    read = rows.from_table(rows.read_table(path))
    assert len(read) == len(written)
    assert all(same(a, b) for a, b in zip(written, read, strict=True))


def test_a_step_file_opens_in_pandas_duckdb_and_datasets(tmp_path: Path) -> None:
    import duckdb
    import pandas

    path = tmp_path / "step-000000.parquet"
    rows.write_table(path, rows.to_table([a_sequence(f"g000001.e{i}.s0", 4 + i) for i in range(3)]))

    frame = pandas.read_parquet(path)
    assert list(frame["id"]) == ["g000001.e0.s0", "g000001.e1.s0", "g000001.e2.s0"]
    assert [len(ids) for ids in frame["input_ids"]] == [4, 5, 6]
    assert json.loads(str(frame["data"].iloc[0]))["answer"] == [2]

    counted = duckdb.connect().execute(f"select id, len(input_ids), list_sum(logprobs) from '{path}' order by id")
    assert [row[1] for row in counted.fetchall()] == [4, 5, 6]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import load_dataset

        loaded = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["versions"][2] == list(frame["versions"].iloc[2])  # type: ignore[index]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step-000007.parquet"
    rows.write_table(path, rows.to_table([a_sequence(length=400)]))
    return path


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_named(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(RecordError, match=r"step-000007\.parquet cannot be read .* restore it from a copy"):
        rows.read_table(file)


def test_a_flipped_bit_is_found(file: Path) -> None:
    content = bytearray(file.read_bytes())
    for place in range(60, 1200, 100):  # in the pages of the token columns
        altered = bytearray(content)
        altered[place] ^= 0x10
        file.write_bytes(altered)
        with pytest.raises(RecordError, match="step-000007"):
            rows.from_table(rows.read_table(file))


def test_a_flipped_bit_of_the_footer_is_told_or_changes_no_column(file: Path) -> None:
    [written] = rows.checked(file, rows.read_table(file))
    content = file.read_bytes()
    first = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    told = 0
    for bit in range(8 * first, 8 * len(content), 29):
        altered = bytearray(content)
        altered[bit // 8] ^= 1 << bit % 8
        file.write_bytes(altered)
        try:
            [read] = rows.checked(file, rows.read_table(file))
        except RecordError as error:
            assert "step-000007.parquet" in str(error)
            told += 1
        else:
            assert same(read, written)
    assert told > 100


@pytest.mark.parametrize("name", ["finish_reason", "interactions", "group_id", "images"])
def test_a_renamed_column_is_told(file: Path, name: str) -> None:
    table = pq.read_table(file)
    pq.write_table(table.rename_columns({name: f"{name}x"}).replace_schema_metadata(rows.SCHEMA.metadata), file)
    with pytest.raises(RecordError, match=f"step-000007.parquet was altered .* there is no column '{name}'. Restore"):
        rows.read_table(file)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, pa.array([b"x"])), file)
    with pytest.raises(RecordError, match=f"the column '{name}' is binary, not "):
        rows.read_table(file)


def test_a_first_token_cannot_be_trained_on(tmp_path: Path) -> None:
    mask = np.array([True, True, False])
    table = rows.to_table([a_sequence(length=3, loss_mask=mask)])
    with pytest.raises(RecordError, match=r"the first token of g000001\.e0\.s0 is in its loss_mask"):
        rows.checked(tmp_path, table)


def test_a_newer_format_is_refused(file: Path) -> None:
    table = pq.read_table(file).replace_schema_metadata({"clew_format": str(rows.FORMAT + 1)})
    pq.write_table(table, file)
    with pytest.raises(RecordError, match=r"is of format 5; this Clew reads formats up to 4\. Upgrade Clew"):
        rows.read_table(file)


def test_columns_of_a_later_compatible_format_are_left_alone(file: Path) -> None:
    table = pq.read_table(file)
    pq.write_table(table.append_column("novelty", pa.array([1])), file)
    assert rows.from_table(rows.read_table(file))[0].id == "g000001.e0.s0"


def test_columns_of_different_length_are_a_programmers_mistake() -> None:
    with pytest.raises(AssertionError, match="columns of different length"):
        a_sequence(loss_mask=np.ones(3, bool))


@pytest.mark.parametrize(("found", "readable"), [("2", False), ("3", True), ("4", True), ("5", False)])
def test_formats_that_are_read(file: Path, found: str, readable: bool) -> None:
    rows.write_table(file, rows.to_table([a_sequence()]).replace_schema_metadata({"clew_format": found}))
    if readable:
        assert rows.from_table(rows.read_table(file))[0].id == "g000001.e0.s0"
    else:
        with pytest.raises(RecordError, match=f"format {found}"):
            rows.read_table(file)
