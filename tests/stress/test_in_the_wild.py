"""Agents as people write them: each fault is named by its line, and none is found in a sound one, on a busy machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clew.stress import waves
from clew.stress.gateway import EngineGateway
from clew.stress.report import Report
from clew.stress.standin import StandIn, byte_tokenizer
from tests.stress import agents_in_the_wild as wild
from tests.stress.judging import ALL, ROWS, judged, some

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Some of the faulty agents never close their sockets; when these are collected is chance."""

QUICK = (wild.SetOrder,)
"""Agents for every change, beside `NeverTold`, which has a test of its own; the others belong to `make slow`."""


@pytest.fixture(autouse=True)
def _cleaned_up() -> Iterator[None]:
    yield
    wild.clean_up()


def stressed(agent: type, latency_s: float, **more: Any) -> Report:
    tokenizer = byte_tokenizer()
    gateway = EngineGateway(StandIn(tokenizer, latency_s=latency_s), tokenizer, None)
    kind, _ = wild.FAULTY.get(agent, ("", ""))
    return judged(agent, gateway, stuck_s=3.0, elsewhere=kind in ("", "differs", "shared"), **more)


@pytest.mark.parametrize(
    "agent",
    [
        pytest.param(agent, id=agent.__name__, marks=() if agent in QUICK else pytest.mark.slow)
        for agent in some(wild.FAULTY)
        if agent is not wild.NeverTold
    ],
)
def test_a_fault_is_found_with_its_line(agent: type) -> None:
    kind, _ = wild.FAULTY[agent]
    for latency_s in (0.1, 0.3, 1.0):
        report = stressed(agent, latency_s)
        if kind != "serial" or not any("one at a time" in note for note in report.notes):  # the machine is too busy
            break
    assert is_found(agent, report), str(report.verdicts)


def is_found(agent: type, report: Report) -> bool:
    kind, where = wild.FAULTY[agent]
    found = [(verdict.kind, verdict.where) for verdict in report.verdicts if verdict.certain]
    return report.outcome == "not fit" and any(each[0] == kind and where in each[1] for each in found)


@pytest.mark.slow
def test_where_it_asked_is_not_where_it_worked_after_that() -> None:
    found = next(each for each in stressed(wild.AsksThenWorks, 0.2).verdicts if each.kind == "differs")
    assert re.search(r"asked at .*agents_in_the_wild\.py:\d+ ask$", found.where)


@pytest.mark.slow
def test_whoever_waits_is_found_and_told_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waves, "SAY_S", 1.0)
    said: list[str] = []
    report = stressed(wild.NeverTold, 0.1, say=said.append)
    assert is_found(wild.NeverTold, report), str(report.verdicts)
    (line, *_) = [line for line in said if "have ended after" in line]
    assert re.match(r"\w+: \d+ of \d+ episodes have ended after \d+ s; most wait at .*:\d+ NeverTold\.run", line)


@pytest.mark.slow
@pytest.mark.parametrize(
    "agent", [pytest.param(agent, id=agent.__name__) for agent in (wild.SOUND if ALL else wild.SOUND[::2])]
)
def test_a_sound_agent_is_not_accused(agent: type) -> None:
    report = stressed(agent, 0.3)
    assert not [verdict for verdict in report.verdicts if verdict.certain], str(report.verdicts)
    assert not report.failures


def test_the_command_says_found_or_sound_in_its_exit_code_and_nothing_after_its_verdict(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(
        "import asyncio\n"
        "import aiohttp\n"
        "from tests.stress.agents_in_the_wild import ask\n"
        "class Fails:\n"
        "    async def run(self, data, **given):\n"
        "        self.session = aiohttp.ClientSession()  # says at the end that it was not closed\n"
        "        raise ValueError('no such tool')\n"
    )
    root = Path(__file__).parents[2]
    options = "--data rows.jsonl --latency 0.05 --batch 2 --group 2 --dp 1 --json report.json"
    ended = subprocess.run(
        [sys.executable, "-m", "clew", "agent", "stress", "mine.Fails", *options.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert ended.returncode == 1, ended.stderr
    *_, last = ended.stdout.strip().splitlines()
    assert last == "mine.Fails: not fit for training"
    assert "2 of 6 rows of the data" in ended.stdout.splitlines()[0]
    assert ended.stdout.index("FOUND (fails)") < ended.stdout.index("episodes/s"), "findings come before tables"
    assert "Unclosed" not in ended.stderr
    assert json.loads((tmp_path / "report.json").read_text())["outcome"] == "not fit"
