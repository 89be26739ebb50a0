"""Batches that another run dumped: what is refused before it is trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from clew.errors import RecordError
from clew.loop.dumped_batches import DumpedBatches, resume_dump
from clew.record import rows
from clew.record.run import RunDirectory
from tests.record.test_rows import a_sequence
from tests.rollout.scripted import config_for


def test_a_dump_with_columns_of_different_length_is_refused(tmp_path: Path) -> None:
    table, shorter = (rows.to_table([a_sequence("g000000.e0.s0", length)]) for length in (6, 5))
    place = table.column_names.index("logprobs")
    dump = tmp_path / "dump" / "step-000000.parquet"
    dump.parent.mkdir()
    rows.write_table(dump, table.set_column(place, table.schema.field(place), shorter.column("logprobs")))
    config = config_for(tmp_path, debug={"replay_rollout_data": True, "path": str(dump.parent)})
    batches = DumpedBatches(config, RunDirectory(tmp_path / "run"))
    with pytest.raises(RecordError, match=r"step-000000\.parquet .* 5 logprobs and 6 input_ids"):
        batches.write(0)


def test_a_copy_beside_the_dumped_batches_is_left_alone(tmp_path: Path) -> None:
    copy = tmp_path / "dump" / "step-000000 (1).parquet"
    copy.parent.mkdir()
    rows.write_table(copy, rows.to_table([a_sequence("g000000.e0.s0")]))
    config = config_for(tmp_path, debug={"dump_rollout_data": True, "path": str(copy.parent)})
    resume_dump(config, RunDirectory(tmp_path / "run"))
    assert copy.exists()
