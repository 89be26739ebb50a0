"""The suite of hangs: four scenarios in `make test`, one of each verdict in `make slow`, all in `make hangs`."""

from __future__ import annotations

import pytest

from tests.hangs.run import HERE, MANIFEST, run

QUICK = ["swallowed_exception", "stopped_rank", "dead_producer_process", "fast_training"]


def of_each_verdict() -> list[str]:
    """Return the first scenario of the manifest with each expected verdict."""
    by_verdict: dict[str, str] = {}
    for name, expected in MANIFEST.items():
        by_verdict.setdefault(expected["patterns"][0], name)
    return list(by_verdict.values())


LONGER = [pytest.param(name, marks=pytest.mark.slow) for name in of_each_verdict() if name not in QUICK]


def test_each_scenario_is_in_the_manifest() -> None:
    assert {path.stem for path in (HERE / "scenarios").glob("*.py")} == set(MANIFEST)


@pytest.mark.parametrize("name", QUICK + LONGER)
def test_a_hang_is_diagnosed(name: str) -> None:
    assert run(name).wrong == ""
