"""Reading the user's data, and the order of prompts."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clew.data import load_rows, order, without_nulls
from clew.errors import DataError
from clew.launch.preflight import check_named
from tests.models import tiny_model
from tests.training.sequences import make_config

ROWS = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(5)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_json_lines_and_parquet_give_the_same_rows(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    lines = write_lines(tmp_path / "rows.jsonl", ROWS)
    assert load_rows(lines, columns=["prompt"]) == ROWS
    assert load_rows(str(tmp_path / "rows.parquet"), columns=["prompt"]) == ROWS
    assert load_rows(lines, limit=2) == ROWS[:2]
    assert load_rows(str(tmp_path / "rows.parquet"), limit=2) == ROWS[:2]


def test_a_missing_file_names_its_neighbour(tmp_path):
    write_lines(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"Did you mean .*train\.jsonl"):
        load_rows(str(tmp_path / "trian.jsonl"))


def test_a_folder_with_the_name_of_a_file_is_called_one(tmp_path):
    folder = tmp_path / "rows.parquet"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "part-0.parquet")
    with pytest.raises(
        DataError, match=r"rows\.parquet: it is a folder\. Name one of the files in it, or .* without \."
    ):
        load_rows(str(folder))
    assert load_rows(str(folder.rename(tmp_path / "rows"))) == ROWS


def test_a_missing_column_names_row_and_nearest(tmp_path):
    path = write_lines(tmp_path / "train.jsonl", [*ROWS, {"promt": "x", "answer": 2}])
    expected = r"row 6 has no column 'prompt'; it has 'promt', 'answer'\. Did you mean 'promt'"
    with pytest.raises(DataError, match=expected):
        load_rows(path, columns=["prompt"])


def test_a_malformed_line_is_named(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": 1}\n\n{"prompt": \n')
    with pytest.raises(DataError, match=r"train\.jsonl:3: this line is not JSON"):
        load_rows(str(path))
    for half in (rb"\ud83d", rb"\uDE00", b"\xed\xa0\xbd"):
        path.write_bytes(b'{"prompt": "\\ud83d\\ude00"}\n{"prompt": [{"content": "' + half + b'"}]}')
        with pytest.raises(DataError, match=r"train\.jsonl:2: a text has half a surrogate pair"):
            load_rows(str(path))
    path.write_text("[1, 2]\n")
    with pytest.raises(DataError, match=r"train\.jsonl:1: expected an object"):
        load_rows(str(path))


def test_no_rows_and_no_parquet(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no rows"):
        load_rows(str(tmp_path / "empty.jsonl"))
    (tmp_path / "cut.parquet").write_bytes(b"PAR1....")
    with pytest.raises(DataError, match=r"Cannot read .* as Parquet"):
        load_rows(str(tmp_path / "cut.parquet"))


def test_rows_beyond_the_limit_are_not_looked_at_before_a_run(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "completion": "2"}\n{"other": 1}\n')
    for supervised in (False, True):
        named = {"path": str(tmp_path / "rows.jsonl")}
        reward = {"reward": "tests.rollout.user_code.exact"}
        check_named(make_config(tmp_path, data={**named, "limit": 1}, rollout=reward), supervised=supervised)
        with pytest.raises(DataError, match=r"data\.path: .*row 2 has no column 'prompt'"):
            check_named(make_config(tmp_path, data=named, rollout=reward), supervised=supervised)


@given(n_rows=st.integers(1, 40), epoch=st.integers(0, 5), seed=st.integers(0, 2**63))
def test_every_epoch_takes_each_row_once(n_rows, epoch, seed):
    rows = [order(n_rows, epoch * n_rows + i, seed) for i in range(n_rows)]
    assert sorted(rows) == list(range(n_rows))


def test_epochs_and_seeds_differ():
    first, second, other = (
        [order(30, i + 30 * epoch, seed) for i in range(30)] for epoch, seed in [(0, 1), (1, 1), (0, 2)]
    )
    assert first != second and first != other


def test_a_row_that_cannot_be_decoded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def rows() -> Iterator[dict]:
        yield {"prompt": "1"}
        raise ImportError("To decode audio, install torchcodec")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows())
    with pytest.raises(DataError, match=r"Cannot read a row of the data set org/spoken, split test: To decode audio"):
        load_rows("org/spoken", split="test")


def test_a_data_set_with_a_loading_script_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.py").write_text("")
    with pytest.raises(DataError, match=r"Cannot load the data set .*/mine, split train: .*mine\.py"):
        load_rows(str(tmp_path / "mine"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: map(_not_decoded, [1]))
    with pytest.raises(DataError, match="Cannot read a row of the data set org/spoken, split train: no decoder"):
        load_rows("org/spoken")


def _not_decoded(_: int) -> dict:
    raise RuntimeError("no decoder")


def test_messages_lose_the_empty_fields_that_parquet_gives_them() -> None:
    part = {"type": "text", "text": "2 + 2 =", "image": None}
    asked = [{"role": "user", "content": [part], "tool_calls": None}, {"role": "assistant", "content": None}]
    assert without_nulls(asked) == [
        {"role": "user", "content": [{"type": "text", "text": "2 + 2 ="}]},
        {"role": "assistant", "content": None},
    ]
    assert part["image"] is None and len(asked[0]) == 3, "the row is recorded as it is"


def test_files_of_a_folder_that_do_not_fit_together_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"b": "x", "c": [1]}\n')
    with pytest.raises(DataError, match="column names don't match"):
        load_rows(str(tmp_path))
