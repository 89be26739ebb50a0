"""The suite of hangs: a few scenarios in every run of the tests; `make hangs` runs all of them."""

from __future__ import annotations

import pytest

from tests.hangs.run import HERE, MANIFEST, run

QUICK = ("swallowed_exception", "stopped_rank", "dead_producer_process", "fast_training")


def test_each_scenario_is_in_the_manifest() -> None:
    assert {path.stem for path in (HERE / "scenarios").glob("*.py")} == set(MANIFEST)


@pytest.mark.parametrize("name", QUICK)
def test_a_hang_is_diagnosed(name: str) -> None:
    assert run(name).wrong == ""
