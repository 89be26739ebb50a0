"""The suite of hangs: a few scenarios in every run of the tests, all of them in `make slow` and `make hangs`."""

from __future__ import annotations

import pytest

from tests.hangs.run import HERE, MANIFEST, run

QUICK = ("swallowed_exception", "stopped_rank", "dead_producer_process", "fast_training")
ABSTAINS = ("busy_asyncio",)
"""Scenarios in which nothing can be decided from outside: coroutines that wait are on no stack."""


def test_each_scenario_is_in_the_manifest() -> None:
    assert {path.stem for path in (HERE / "scenarios").glob("*.py")} == set(MANIFEST)


@pytest.mark.parametrize("name", QUICK)
def test_a_hang_is_diagnosed(name: str) -> None:
    assert run(name).wrong == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MANIFEST) - set(QUICK) - set(ABSTAINS)))
def test_every_other_hang_is_diagnosed(name: str) -> None:
    assert run(name).wrong == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ABSTAINS)
def test_it_abstains_rather_than_calls_a_sound_job_hung(name: str) -> None:
    assert run(name).report["exit_code"] in (0, 3)
