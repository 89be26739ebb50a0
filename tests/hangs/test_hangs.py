"""The suite of hangs: four scenarios in `make test`, two of each verdict in `make slow`, all in `make hangs`."""

from __future__ import annotations

import pytest

from tests.hangs.run import HERE, MANIFEST, run

QUICK = ["swallowed_exception", "stopped_rank", "dead_producer_process", "fast_training"]


def of_each_verdict(count: int) -> list[str]:
    """Return the first scenarios of the manifest with each expected verdict."""
    by_verdict: dict[str, list[str]] = {}
    for name, expected in MANIFEST.items():
        by_verdict.setdefault(expected["patterns"][0], []).append(name)
    return [name for names in by_verdict.values() for name in names[:count]]


LONGER = [pytest.param(name, marks=pytest.mark.slow) for name in of_each_verdict(2) if name not in QUICK]


def test_each_scenario_is_in_the_manifest() -> None:
    assert {path.stem for path in (HERE / "scenarios").glob("*.py")} == set(MANIFEST)


@pytest.mark.parametrize("name", QUICK + LONGER)
def test_a_hang_is_diagnosed(name: str) -> None:
    assert run(name).wrong == ""
