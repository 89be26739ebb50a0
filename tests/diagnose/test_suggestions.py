"""Suggestions that follow a first difference, by which sequences, parameters and neighbouring steps it spares."""

from __future__ import annotations

import json

import numpy as np
import pytest

from clew.diagnose.stages import suggestions
from clew.loop.differences import Difference, in_stage, in_tensors
from clew.record.batch_digest import to_hex
from clew.record.run import RunDirectory
from tests.diagnose.planted import seal

IDS = ["g000001.e0.s0", "g000001.e1.s0", "g000002.e0.s0", "g000002.e1.s0"]


@pytest.mark.parametrize(
    ("added", "suggested"),
    [
        ([0, 0.5, 0, 0], "one sequence differs alone"),
        ([0, 0, 0.5, 0.25], "exactly the sequences of the group g000002 differ"),
        ([1e-6, 0, 2e-6, 1e-6], "no value differs by more than 2.0e-06: this is rounding"),
        ([0.5, 0, 0.5, 0], ""),
    ],
)
def test_by_sequences(added: list[float], suggested: str) -> None:
    recorded = [np.zeros(3, np.float32) for _ in IDS]
    found = in_stage(1, "advantages", IDS, recorded, [np.full(3, each, np.float32) for each in added])
    assert found is not None and found.suggests.startswith(suggested) and bool(found.suggests) == bool(suggested)


@pytest.mark.parametrize(
    ("now", "suggested"),
    [([5, 6, 7], "the learning rate does"), ([1, 2, 7], "its moments in the optimizer do"), ([5, 6, 3], "")],
)
def test_by_parameters(now: list[int], suggested: str) -> None:
    found = in_tensors(1, "update", ["a", "b", "c"], to_hex([1, 2, 3]), to_hex(now))
    assert found is not None and suggested in found.suggests and bool(found.suggests) == bool(suggested)


def test_by_what_its_neighbours_say(run: RunDirectory) -> None:
    path = run.steps.json_path(3)
    said = json.loads(path.read_text())
    said["config"]["training"]["lr"] = 0.5
    path.write_text(json.dumps(said))
    seal(run)
    found = [Difference(step=step, stage="update", where="a", recorded=1, found=2) for step in (3, 2, 0)]
    lines = [list(suggestions(each, {"": run})) for each in found]
    assert lines == [["this suggests: config.training.lr is 0.5 at step 3, and 0.001 just before and after it"], [], []]
