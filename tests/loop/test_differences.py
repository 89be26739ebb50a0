"""Comparing two computations: words about the values that differ."""

from __future__ import annotations

import numpy as np
import pytest

from clew.loop.differences import in_stage, in_stages
from clew.loop.tolerance import EXACT, TOLERANCES, Tolerance


@pytest.mark.parametrize("tolerance", [EXACT, TOLERANCES["float32"]])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_is_not_taken_for_rounding(tolerance: Tolerance, broken: float) -> None:
    ids = ["g0.e0", "g0.e1", "g1.e0"]
    sound = [np.zeros(3, np.float32) for _ in ids]
    spoilt = [*(np.array([0, broken, 0], np.float32) for _ in ids[:2]), sound[2]]
    for recorded, found in ((sound, spoilt), (spoilt, sound)):
        difference = in_stage(3, "loss", ids, recorded, found, tolerance)
        assert difference is not None and difference.suggests.startswith("exactly the sequences of the group g0 differ")


def test_equal_infinities_beside_a_difference_are_no_warning() -> None:
    then, now = np.array([-np.inf, 0], np.float32), np.array([-np.inf, 1], np.float32)
    difference = in_stage(3, "logprobs", ["g0.e0"], [then], [now], EXACT)
    assert difference is not None and difference.position == 1


def test_a_reference_that_differs_is_named_before_the_advantages_that_follow_from_it() -> None:
    names = ("reference_logprobs", "values", "returns", "advantages", "proximal_logprobs")
    then, now = ({name: {"g0.e0": np.full(1, value, np.float32)} for name in names} for value in (0, 1))
    found = in_stages(3, ["g0.e0"], stages=(then, now), tensors=({}, {}), plan=[[[0]]], parameters=[], tolerance=EXACT)
    assert [difference.stage for difference in found] == list(names)
