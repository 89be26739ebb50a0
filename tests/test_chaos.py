"""A short version of `make chaos`: what holds after kills at random moments."""

import pytest

from bench.chaos import chaos


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_survives_kills_at_random_moments() -> None:
    tallies = chaos(kills=4, seed=11, steps=30)
    assert sum(sum(tally.kills.values()) for tally in tallies) == 4
    for tally in tallies:
        assert tally.sound, tally
        assert tally.steps == 30 and tally.groups == 120
