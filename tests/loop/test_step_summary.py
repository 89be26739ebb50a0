"""Facts about a batch that the index of the steps repeats."""

from __future__ import annotations

import numpy as np

from clew.loop.step_summary import facts_of
from tests.record.test_rows import a_sequence


def test_a_batch_without_trained_tokens_is_of_the_version_that_it_trains() -> None:
    row = a_sequence("g000001.e0.s0", length=3, loss_mask=np.zeros(3, np.bool_))
    assert facts_of([row], 7) == {"groups": ["g000001"], "versions": [7, 7]}
