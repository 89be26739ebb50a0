"""Helpers that the stress's tests share."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Mapping
from typing import Any

from clew.stress.elsewhere import Source
from clew.stress.gateway import Gateway
from clew.stress.report import Report
from clew.stress.run import stressed
from clew.stress.watch import STUCK_S

ROWS = [{"prompt": f"What is {word} and {word}?"} for word in ("one", "two", "three", "four", "five", "six")]


ALL = bool(os.environ.get("CLEW_ALL_AGENTS"))
"""True to judge all agents, as `make stress` does; otherwise `some` of them are judged, and in `make slow`."""


def some(agents: Mapping[type, tuple[str, str]]) -> list[type]:
    """Return all faulty agents, or the first two with each kind of fault."""
    by_kind: dict[str, list[type]] = {}
    for agent, (kind, _) in agents.items():
        by_kind.setdefault(kind, []).append(agent)
    return list(agents) if ALL else [agent for alike in by_kind.values() for agent in alike[:2]]


def judged(cls: type, gateway: Gateway, stuck_s: float = STUCK_S, *, elsewhere: bool = False, **more: Any) -> Report:
    """Run a small stress of an agent, eight episodes at once.

    elsewhere: some also in other processes.   more: of `stressed`.
    """
    source = Source(path=f"{cls.__module__}.{cls.__qualname__}") if elsewhere else None
    report = stressed(
        cls(), ROWS, gateway=gateway, batch=8, group=2, dp=2, timeout_s=60, stuck_s=stuck_s, source=source, **more
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the clients that some of the agents keep
        gc.collect()
    return report
