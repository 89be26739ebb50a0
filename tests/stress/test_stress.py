"""Each fault is found in the agent that has it, and none in a sound one."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from clew.stress import run, waves
from clew.stress.elsewhere import Source
from clew.stress.gateway import EngineGateway
from clew.stress.report import Report
from clew.stress.standin import StandIn, byte_tokenizer
from clew.stress.views import page, rendered
from clew.stress.watch import STUCK_S
from tests.stress import agents_faulty, agents_sound
from tests.stress.judging import ALL, ROWS, judged, some

LATENCY_S = 0.03


def stressed(cls: type, stuck_s: float = STUCK_S, latency_s: float = LATENCY_S) -> Report:
    # each stress has an event loop of its own, and a lock belongs to the one in which it is first waited for
    agents_faulty.LOCK = asyncio.Lock()
    tokenizer = byte_tokenizer()
    return judged(cls, EngineGateway(StandIn(tokenizer, latency_s=latency_s), tokenizer, None), stuck_s)


FAULTS = {
    agents_faulty.Sleeps: ("blocks", "Sleeps.run"),
    agents_faulty.CallsUrllib: ("blocks", "CallsUrllib.run"),
    agents_faulty.Computes: ("blocks", "Computes.run"),
    agents_faulty.GlobalLock: ("serial", "GlobalLock.run, in asyncio/locks.py"),
    agents_faulty.RateLimit: ("serial", "RateLimit.run"),
    agents_faulty.SmallPool: ("serial", "Agent.ask"),
    agents_faulty.OneWorker: ("serial", "OneWorker.run"),
    agents_faulty.PlainLock: ("serial", "PlainLock.run"),
    agents_faulty.KeepsPrompt: ("shared", "agent.prompt"),
    agents_faulty.LocksTooShort: ("shared", "agent.prompt"),
    agents_faulty.SharedHistory: ("shared", "agents_faulty.HISTORY"),
    agents_faulty.DefaultArgument: ("differs", ""),
    agents_faulty.DefaultOfVariable: ("shared", "agents_faulty.NOTES.prompt"),
    agents_faulty.OneFile: ("shared", "OneFile.run"),
    agents_faulty.CrossesAnswers: ("differs", ""),
    agents_faulty.OneClient: ("shared", "OneClient.run"),
    agents_faulty.PlainState: ("shared", "agent.task"),
    agents_faulty.ChangesFolder: ("shared", "ChangesFolder.run"),
    agents_faulty.RemovesFolder: ("shared", "RemovesFolder.run"),
    agents_faulty.SetsVariable: ("shared", "SetsVariable.run"),
    agents_faulty.LeaksTasks: ("growth", "LeaksTasks.run"),
    agents_faulty.LeaksThreads: ("growth", "Thread-"),
    agents_faulty.LeaksFiles: ("growth", "(deleted)"),
    agents_faulty.LeaksMemory: ("growth", "agents_faulty.py"),
    agents_faulty.LeaksBuffers: ("growth", ""),
    agents_faulty.Random: ("differs", ""),
    agents_faulty.FailsInCompany: ("fails", "FailsInCompany.run"),
    agents_faulty.SendsFirstParagraph: ("rewrites", "Talks.run"),
    agents_faulty.StripsText: ("rewrites", "StripsText.run"),
    agents_faulty.SlidingWindow: ("rewrites", "Talks.run"),
    agents_faulty.ClearsResults: ("rewrites", "ToolAgent.run"),
    agents_faulty.Greedy: ("sampling", "Greedy.ask"),
    agents_faulty.RewardsFaults: ("rewards", "Talks.run"),
    agents_faulty.AsksForWhole: ("rewards", "AsksForWhole.run"),
    agents_faulty.LeavesFolders: ("growth", "LeavesFolders.run"),
    agents_faulty.NamesNoResponse: ("fails", ""),
    agents_faulty.DrawsItsReward: ("differs", ""),
}
SOUND = [
    agents_sound.OpenAIAgent,
    agents_sound.SetsItsReward,
    agents_sound.HttpxAgent,
    agents_sound.AiohttpAgent,
    agents_sound.GatherAgent,
    agents_sound.CachingAgent,
    agents_sound.SandboxAgent,
    agents_sound.PlainAgent,
    agents_sound.TakesTurns,
    agents_sound.PlainTurns,
    agents_sound.KeepsBuffers,
    agents_sound.KeepsAnswers,
    agents_sound.Trims,
    agents_sound.MustCall,
    agents_sound.ToolsOfAnthropic,
    agents_sound.GrowsText,
    agents_sound.TriesAgain,
]


@pytest.fixture
def closing() -> Iterator[None]:
    """Close what the leaks keep open."""
    agents_faulty.LeaksThreads.end.clear()
    yield
    agents_faulty.LeaksThreads.end.set()
    for each in agents_faulty.LeaksFiles.open:
        each.close()
    for folder in agents_faulty.LeavesFolders.folders:
        Path(folder).rmdir()
    agents_faulty.LeavesFolders.folders.clear()


QUICK = (agents_faulty.GlobalLock, agents_sound.PlainAgent)
"""Agents for every change; the others belong to `make slow`."""


def each(agents: Iterable[type]) -> list[Any]:
    return [
        pytest.param(agent, id=agent.__name__, marks=() if agent in QUICK else pytest.mark.slow) for agent in agents
    ]


@pytest.mark.parametrize("agent", each(some(FAULTS)))
def test_a_fault_is_found(agent: type, closing: None) -> None:
    kind, where = FAULTS[agent]
    for longer in (1, 1, 3, 10):  # of models; what the fault itself takes does not grow with it
        report = stressed(agent, latency_s=longer * LATENCY_S)
        unjudged = report.outcome == "not judged" or any("one at a time" in note for note in report.notes)
        if not unjudged:  # else the machine is too slow, or too busy
            break
    found = [(verdict.kind, verdict.where) for verdict in report.verdicts if verdict.certain]
    assert any(each[0] == kind and where in each[1] for each in found), str(report.verdicts)
    assert {"serial", "blocks"}.isdisjoint({each[0] for each in found} - {kind}), str(report.verdicts)
    assert report.outcome == "not fit"


def test_a_blocked_loop_is_not_booked_under_reward(closing: None) -> None:
    report = stressed(agents_faulty.RunsProcesses)
    assert any(each.kind == "blocks" and "RunsProcesses.run" in each.where for each in report.verdicts if each.certain)
    latency = report.measured.latency
    assert latency["blocked"]["p50"] > latency["reward"]["p50"]


@pytest.mark.parametrize("agent", each(SOUND if ALL else SOUND[::2]))
def test_a_sound_agent_gets_no_verdict(agent: type) -> None:
    report = stressed(agent)
    assert not [verdict for verdict in report.verdicts if verdict.certain], str(report.verdicts)
    assert not report.failures
    latency = report.measured.latency
    assert latency["episode"]["p50"] >= latency["model"]["p50"] >= 0.9 * LATENCY_S


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_request_after_the_end_of_an_episode_is_not_answered_in_another_process_either() -> None:
    tokenizer = byte_tokenizer()
    gateway = EngineGateway(StandIn(tokenizer, latency_s=LATENCY_S), tokenizer, None)
    report = judged(agents_faulty.AsksAfterwards, gateway, elsewhere=True)
    assert not [verdict for verdict in report.verdicts if verdict.kind == "differs"], str(report.verdicts)
    assert any("nobody looked at their errors" in verdict.what for verdict in report.verdicts)


@pytest.mark.slow
def test_reasoning_that_is_not_sent_back_is_suspected() -> None:
    report = stressed(agents_faulty.SendsNoReasoning)
    [perhaps] = report.verdicts
    assert (perhaps.kind, perhaps.certain) == ("rewrites", False)
    assert "the client sends no reasoning back" in perhaps.evidence[0]


def test_the_report_in_its_three_forms() -> None:
    report = stressed(agents_faulty.Markup)
    assert report.width == 8
    assert [wave.width for wave in report.waves] == [1, 2, 8, 8]
    as_json = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert as_json["outcome"] == "not fit"
    assert as_json["failures"][0]["count"] > 8
    html = page(report)
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(rendered(report))
    shown = console.export_text()
    assert "not fit for training" in shown
    assert "episodes failed: ValueError: <script>[bold]" in shown


def test_a_loop_that_stands_still_for_good_is_interrupted_and_explained() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    report = stressed(agents_faulty.HoldsLock, stuck_s=1.0)
    [verdict] = report.verdicts
    assert verdict.kind == "blocks" and report.outcome == "not fit"
    assert verdict.where.endswith("HoldsLock.run")
    assert verdict.evidence[0].startswith("it stands at ") and "HoldsLock.run" in verdict.evidence[0]
    assert any("1 episodes wait at" in line and "Agent.ask" in line for line in verdict.evidence)
    assert report.notes == ["all after the wave 'narrow', in which the event loop stood still. Repair that first."]
    assert [(each.error, each.count) for each in report.failures] == [
        ("it was stopped: the event loop had stood still", 2)
    ]
    assert not agents_faulty.HoldsLock.lock.locked() and signal.getsignal(signal.SIGUSR2) is before
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(rendered(report))
    assert "not fit for training" in console.export_text()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a coroutine ignored GeneratorExit
@pytest.mark.parametrize("agent", [agents_faulty.Stubborn, agents_faulty.CatchesAll])
def test_an_episode_that_swallows_its_cancellation_is_stopped(agent: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waves, "CANCEL_S", 0.5)
    report = stressed(agent, stuck_s=1.0)
    assert [(each.kind, each.where) for each in report.verdicts] == [("hangs", report.verdicts[0].where)]
    assert f"{agent.__name__}.run" in report.verdicts[0].where
    [failure] = report.failures
    assert failure.error.startswith("did not end: nothing moved for")


def test_an_episode_that_asks_without_a_limit_is_told_with_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waves, "MANY", 3)
    tokenizer = byte_tokenizer()
    gateway = EngineGateway(StandIn(tokenizer, latency_s=LATENCY_S), tokenizer, None)
    report = run.stressed(agents_faulty.AsksUntilItIsRight(), ROWS, gateway=gateway, batch=2, group=1, timeout_s=0.4)
    [verdict] = report.verdicts
    assert verdict.kind == "hangs" and re.search(r"\d+ requests to the model; bound the number", verdict.evidence[0])


def test_an_episode_that_takes_anothers_reply_is_told_where_it_lies() -> None:
    agents_faulty.CachesReplies.replies.clear()
    report = stressed(agents_faulty.CachesReplies)
    verdict = report.verdicts[0]
    assert (verdict.kind, verdict.certain) == ("shared", True) and "CachesReplies.replies" in verdict.where
    assert "replies are cached across episodes; each episode must ask for itself" in verdict.evidence
    assert "episodes failed in two waves of 8 at once" in verdict.what
    assert all("CachesReplies" in each.at or "Agent.run" in each.at for each in report.failures)


@pytest.mark.slow
def test_a_failure_while_a_finding_is_confirmed_is_reported() -> None:
    agents_faulty.FailsLate.runs = itertools.count(1)
    report = stressed(agents_faulty.FailsLate)
    assert [(each.error, each.count) for each in report.failures] == [("ValueError: late", 1)]


def test_text_of_another_row_is_suspected_if_no_other_process_can_be_run() -> None:
    tokenizer = byte_tokenizer()
    gateway = EngineGateway(StandIn(tokenizer, latency_s=LATENCY_S), tokenizer, None)
    source = Source(path="no_such_module.Agent")
    report = run.stressed(agents_faulty.KeepsFirstRow(), ROWS, gateway=gateway, batch=4, group=1, source=source)
    assert any("no_such_module" in note for note in report.notes)
    assert ["text of one row" in each.what for each in report.verdicts if not each.certain] == [True], report.verdicts


@pytest.mark.slow
def test_a_slow_model_is_no_failure_in_another_process() -> None:
    tokenizer = byte_tokenizer()
    gateway = EngineGateway(StandIn(tokenizer, latency_s=1.5), tokenizer, None)
    source = Source(path="tests.stress.agents_faulty.Agent")
    report = run.stressed(agents_faulty.Agent(), ROWS, gateway=gateway, batch=2, group=1, timeout_s=1.0, source=source)
    assert not [each for each in report.verdicts if each.certain], str(report.verdicts)


def test_what_an_episode_does_to_the_process_is_found_and_undone() -> None:
    before = Path.cwd(), dict(os.environ), signal.getsignal(signal.SIGUSR1)
    report = stressed(agents_faulty.HandlesSignals)
    assert report.outcome == "not fit"
    found = {verdict.what.partition(" is changed")[0]: verdict for verdict in report.verdicts}
    assert {"the handler of SIGUSR1", "the umask"} <= set(found)
    assert all("agents_faulty.py" in found[name].where for name in found)
    assert found["the umask"].kind == "shared" and "HandlesSignals.run" in found["the umask"].where
    once = stressed(agents_faulty.SetsVariableOnce)
    assert not any(verdict.certain for verdict in once.verdicts)
    [perhaps] = once.verdicts
    assert perhaps.what.startswith("os.environ['AGENT_HOME'] is changed") and "perhaps once for all" in perhaps.what
    assert before == (Path.cwd(), dict(os.environ), signal.getsignal(signal.SIGUSR1))
