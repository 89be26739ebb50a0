"""The parts of the stress that judge, with numbers made by hand."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import clew
from clew.gateway.episode_keys import EpisodeKeys
from clew.gateway.output_parser import parse_output
from clew.inference.protocol import Completion, GenerateRequest, SamplingParams
from clew.record.writer import Writer
from clew.stress import agent_steps, gateway, growth, repeat, serial, shared, watch, waves
from clew.stress.agent_steps import Episode
from clew.stress.busy import sleeps_in_a_call
from clew.stress.crossings import crossed_answers, crossed_rows
from clew.stress.elsewhere import Elsewhere, judge_elsewhere
from clew.stress.frames import Code, Place, is_clew, stack_of_coroutine, stack_of_thread
from clew.stress.gateway import Noted
from clew.stress.growth import Sample, grows
from clew.stress.judge import _differing, _held, judge, judge_warnings
from clew.stress.origins import Origins, Written, judge_written
from clew.stress.process_state import ProcessState
from clew.stress.repeat import Behaviour
from clew.stress.report import Report, seconds_of_parts
from clew.stress.requests import Request, Requests
from clew.stress.run import Stress
from clew.stress.serial import Waits
from clew.stress.shared import ObjectChange
from clew.stress.standin import StandIn, byte_tokenizer, offered_tools
from clew.stress.variables import Sources, Uses
from clew.stress.verdict import Verdict
from clew.stress.waves import Wave
from tests.models import tiny_tokenizer
from tests.stress import agents_faulty

PARAMS = SamplingParams(max_new_tokens=40)


def request(episode: str, asked: str, answered: str, came: float = 0.0, done: float = 1.0) -> Request:
    return Request(episode=episode, asked=asked, answered=answered, came=came, done=done)


def test_code_beside_clews_and_beside_the_agents_package_is_not_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clews = Path(clew.__file__).parent
    code = Code(Holder())
    assert is_clew(str(clews / "cli" / "main.py")) and not code.is_user(str(clews / "cli" / "main.py"))
    assert not is_clew(f"{clews}_agents.py") and code.is_user(f"{clews}_agents.py")
    library = tmp_path / "site-packages"
    (library / "planted_package").mkdir(parents=True)
    (library / "planted_package" / "__init__.py").write_text("class Agent: ...\n")
    monkeypatch.syspath_prepend(library)
    own = Code(importlib.import_module("planted_package").Agent())
    assert own.is_user(str(library / "planted_package" / "tools.py"))
    assert not own.is_user(str(library / "planted_package_of_others" / "tools.py"))


def test_requests_side_by_side_take_the_models_time_once() -> None:
    requests = Requests()
    for came in (0.0, 1.0, 20.0):
        requests.note(request("a", "", "", came=came, done=came + 10.0))
    assert requests.with_the_model() == {"a": 21.0}


def test_what_asyncio_reports_besides_is_printed_once(caplog: pytest.LogCaptureFixture) -> None:
    async def report() -> list[Verdict]:
        complaints, loop = growth.Complaints(Code(object())), asyncio.get_running_loop()
        loop.set_exception_handler(complaints.hear)
        for _ in range(3):
            loop.call_soon(lambda: [][1])
            await asyncio.sleep(0)
        loop.call_exception_handler({"message": growth.NEVER_CLOSED})
        return complaints.verdicts(1, Origins(Code(object())))

    assert len(asyncio.run(report())) == 1
    [record] = caplog.records
    assert record.getMessage().startswith("Exception in callback") and "IndexError" in caplog.text


def test_the_line_of_a_change_is_that_of_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLEW_TEST_A", "CLEW_TEST_B"):
        monkeypatch.setenv(name, "0")

    def first() -> None:
        os.environ["CLEW_TEST_A"] = "1"

    def second() -> None:
        os.environ["CLEW_TEST_B"] = "1"

    async def changes() -> list[str]:
        async with ProcessState(Code(object())) as state:
            first()
            second()
            state.stepped(Episode("g0.e0", {}))
            library: dict[str, Any] = {"os": os}
            code = compile("os.environ['CLEW_TEST_A'] = '2'", "<library>", "exec")
            thread = threading.Thread(target=exec, args=(code, library))
            thread.start()
            await asyncio.to_thread(thread.join)
            state.stepped(Episode("g0.e1", {}))
        return [each.where.partition(",")[0].rpartition(".")[2] for each in state.changes]

    assert asyncio.run(changes()) == ["first", "second", ""]


def test_a_generator_with_a_seed_is_no_chance() -> None:
    def seeded() -> None:
        np.random.default_rng(7)
        np.random.default_rng(seed=[1, 2])

    def unseeded() -> None:
        np.random.default_rng()
        np.random.default_rng(None)

    async def drawn() -> list[str]:
        async with Origins(Code(object())) as origins:
            token = agent_steps.current_episode.set(Episode("a", {}))
            seeded()
            unseeded()
            agent_steps.current_episode.reset(token)
        return [line.rpartition(".")[2] for line in origins.drawn.elements()]

    assert asyncio.run(drawn()) == ["unseeded", "unseeded"]


def test_only_the_users_own_lines_read_a_clock() -> None:
    def timed() -> None:
        time.perf_counter()

    async def read() -> Origins:
        async with Origins(Code(object())) as origins:
            token = agent_steps.current_episode.set(Episode("a", {}))
            timed()
            asyncio.get_running_loop().time()
            await asyncio.sleep(0)
            agent_steps.current_episode.reset(token)
        return origins

    origins = asyncio.run(read())
    assert [line.rpartition(".")[2] for line in origins.clocks.elements()] == ["timed"] and not origins.drawn
    first, second = rewarded(a=1.0), rewarded(a=2.0)
    [verdict] = _differing(first, second, first, second, origins)
    assert "timed" in verdict.where and "a clock is read" in verdict.evidence[-1]


def test_a_failure_without_a_line_is_placed_at_the_agents_run() -> None:
    agent, episode = agents_faulty.PaysNothingDefined(), Episode("a", {"prompt": "p"})
    agent.ask = lambda *_, **__: asyncio.sleep(0, "words")  # type: ignore[method-assign]
    session = contextlib.nullcontext(("http://", "key", None))
    asyncio.run(
        agent_steps.run_episode(agent, episode, lambda _: session, timeout_s=None, stepped=None, code=Code(agent))
    )
    assert episode.error is not None and episode.error.startswith("PaysNothingDefined.run returned nan")
    assert re.search(r"agents_faulty\.py:\d+ PaysNothingDefined\.run$", episode.at)


def test_the_line_that_started_a_thread_is_known() -> None:
    def started() -> threading.Thread:
        thread = threading.Thread(target=print)
        thread.start()
        return thread

    async def lines() -> list[str]:
        async with Origins(Code(object())) as origins:
            thread = started()
            thread.join()
            return [origins.threads[thread].rpartition(".")[2]]

    assert asyncio.run(lines()) == ["started"]
    assert "calls_noted" not in threading.Thread.start.__qualname__


def test_two_episodes_of_each_row_are_watched_side_by_side() -> None:
    async def watched(batch: int, group: int) -> list[str]:
        gateway: Any = SimpleNamespace(requests=Requests(), sessions=EpisodeKeys())
        runner = waves.WaveRunner(Holder(), gateway, timeout_s=1.0, stuck_s=1.0, say=print)
        rows = [{"prompt": str(number)} for number in range(16)]
        return [id for id, _ in Stress(Holder(), rows, runner, None, batch=batch, group=group, dp=1)._watched]

    assert asyncio.run(watched(8, 3)) == [f"g00000{row}.e{copy}" for copy in (0, 1) for row in range(4)]
    assert asyncio.run(watched(16, 1)) == [f"g00000{row}.e0" for row in range(8)]
    assert len(asyncio.run(watched(1, 16))) == 8


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_the_stand_in_tells_an_episode_the_same_again_and_no_two_the_same(tokenizer: Any) -> None:
    engine = StandIn(tokenizer, latency_s=0, tokens=40)

    async def ask(name: str, ids: list[int]) -> Completion:
        return await engine.generate(GenerateRequest(ids, PARAMS, id=name))

    async def ask_all() -> list[list[int]]:
        names = [("a.i0", [7]), ("a.i1", [7]), ("a.i2", [8]), ("b.i0", [7])]
        return [(await ask(*each)).output_ids for each in names]

    first, second = asyncio.run(ask_all()), asyncio.run(ask_all())
    assert first == second
    assert len({tuple(ids) for ids in first}) == 4
    assert all(ids[-1] == tokenizer.eos_token_id and 20 <= len(ids) <= 40 for ids in first)


def test_the_stand_in_writes_like_a_model() -> None:
    tokenizer = byte_tokenizer()
    engine = StandIn(tokenizer, latency_s=0)
    limits = {"enum": [3], "type": "integer"}
    tool = {"name": "go", "parameters": {"properties": {"to": {"type": "string"}, "limit": limits}}}

    async def answers(prompt: str, limit: int = 512, count: int = 60) -> list[str]:
        offered_tools.set([{"type": "function", "function": tool}])
        params = SamplingParams(max_new_tokens=limit)
        ids: Any = tokenizer(prompt)["input_ids"]
        said = [await engine.generate(GenerateRequest(ids, params, id=f"e{number}.i0")) for number in range(count)]
        assert all(each.finish_reason == "stop" for each in said)
        return [str(tokenizer.decode(each.output_ids, skip_special_tokens=True)) for each in said]

    said = asyncio.run(answers("hello"))
    parsed = [parse_output(tokenizer, text, text, "", [tool]) for text in said]
    assert all(each.reasoning and not each.unparsed and not each.left_out for each in parsed)
    assert any(each.content != each.content.strip() for each in parsed if not each.calls)
    assert any("\n\n" in each.content.strip() for each in parsed)
    assert max(len(text) for text in said) > 400
    calls = [each.calls for each in parsed if each.calls]
    assert 20 < len(calls) < 50
    assert all(name == "go" and arguments["limit"] == 3 and arguments["to"] for ((name, arguments),) in calls)
    for text in asyncio.run(answers("hello", limit=64)):
        assert text.count("<tool_call>") == text.count("</tool_call>"), "it fits, or there is none"
    begin = '<tool_call>\n{"name": "'
    [forced] = asyncio.run(answers(f"hello{begin}", count=1))
    assert parse_output(tokenizer, begin + forced, begin + forced, "", [tool]).calls


def test_recorded_texts_latency_and_notes(tokenizer: Any) -> None:
    requests = Requests()
    texts = ("one", "two")
    engine = Noted(StandIn(tokenizer, latency_s=0.02, texts=texts), tokenizer, requests)

    async def ask() -> None:
        await asyncio.gather(*(engine.generate(GenerateRequest([9, 9], PARAMS, id=f"e{i}.i0")) for i in range(8)))

    asyncio.run(ask())
    noted = requests.take()
    assert {each.answered for each in noted} == set(texts)
    assert sorted(each.episode for each in noted) == [f"e{i}" for i in range(8)]
    assert all(each.done - each.came >= 0.02 for each in noted)
    assert requests.take() == []
    short = asyncio.run(engine.generate(GenerateRequest([9], SamplingParams(max_new_tokens=2), id="x.i0")))
    assert (len(short.output_ids), short.finish_reason) == (2, "length")


@pytest.mark.parametrize(
    ("counts", "slope"),
    [
        ([5, 15, 25, 35], 1.0),
        ([5, 6, 7, 8], 0.1),
        ([0, 10, 10, 10], None),  # warms up
        ([0, 10, 15, 16], None),  # levels off
        ([0, 100, 170, 219, 253], None),  # each wave adds less than the one before
        ([0, 30, 50, 70, 90], 2.25),  # warms up, and leaks
        ([3, 0, 4, 1], None),  # noise
        ([0, 10], None),  # too few to tell
    ],
)
def test_steady_growth(counts: list[int], slope: float | None) -> None:
    samples = [Sample(episodes=10 * i, counts={"tasks": count}) for i, count in enumerate(counts)]
    found = grows(samples, "tasks")
    assert found == (pytest.approx(slope) if slope is not None else None)
    assert len(growth.judge_growth(samples)) == (slope is not None)


def test_concurrency_of_intervals() -> None:
    intervals = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]
    assert serial.concurrency(intervals) == [(0.0, 1), (1.0, 2), (2.0, 1), (3.0, 0), (5.0, 1), (6.0, 0)]
    assert serial.union(intervals) == 4.0


def crowd(
    width: int, seconds: float, mean_s: float, waited: float, busy: float = 0.1, model_s: float = 1.0, **more: Any
) -> Wave:
    """Return a wave of episodes that all take mean_s. busy: a share of the time."""
    episodes = [Episode(f"e{number}", {}, finished=mean_s) for number in range(width)]
    wave = Wave(
        name="",
        width=width,
        episodes=episodes,
        requests=[request(episode.id, "p", "x", done=model_s) for episode in episodes],
        seconds=seconds,
        cpu_s=0.0,
        busy_s=busy * seconds,
        waits=Waits(set(), Code(Holder()), set),
        blocks=[],
    )
    wave.waits.seconds |= {Place("lock"): waited * width, Place("elsewhere"): 1.0 * width}
    return replace(wave, **more)


def test_a_lock_is_where_the_additional_time_is_spent() -> None:
    alone, narrow = crowd(1, 1.0, 1.0, 0.0), crowd(4, 4.0, 2.5, 1.5)
    found = serial.verdict(alone, narrow, crowd(16, 16.0, 8.5, 7.5))
    assert found is not None
    assert (found.kind, found.where) == ("serial", "lock")
    assert "throughput stops at 1 " in found.what
    assert serial.verdict(alone, crowd(4, 1.0, 1.0, 0.0), crowd(16, 1.1, 1.05, 0.0)) is None
    assert serial.verdict(alone, narrow, crowd(16, 16.0, 8.5, 7.5, busy=0.9)) is None  # the processor's doing
    block = watch.Block(place=Place("sleep"), seconds=13.0, computing=False)
    blocked = crowd(16, 16.0, 8.5, 7.5, blocks=[block])  # the doing of a call that blocks the loop
    assert serial.verdict(alone, narrow, blocked) is None
    slow = crowd(16, 16.0, 8.5, 7.5, model_s=6.0)
    assert serial.verdict(alone, narrow, slow) is None and serial.by_model(alone, slow)
    assert serial.verdict(alone, narrow, crowd(16, 16.0, 8.5, 7.5, model_s=3.0)) is not None


def test_crossings() -> None:
    secret, common = "kx82 hfj3 92jf lq0p vn4k 1k2j 88fw zm3d 0c7q j1xv tt5n", "the answer is forty-two, I think"
    requests = [
        request("a", "What?", secret + common, 0, 1),
        request("b", "What?", common, 0, 1),
        request("b", f"{common} What? {secret[3:]}", "", 2, 3),
        request("a", f"{secret} What?", "", 2, 3),
    ]
    assert [(each.asker, each.owner) for each in crossed_answers(requests)] == [("b", "a")]
    assert crossed_answers(requests, lambda episode, text: episode == "b" and text in secret + common) == []
    longer = [*requests, request("b", "Once more?", f"So: {secret}", 1, 2)]
    assert crossed_answers(longer) == []
    quoting = [request("a", secret, secret, 0, 1), request("b", secret, "", 2, 3)]
    assert crossed_answers(quoting) == []


class Holder:
    def __init__(self) -> None:
        self.task = "none"
        self.cache: dict[str, str] = {}
        self.count = 0
        self.history: list[str] = []


def episodes() -> tuple[Episode, Episode]:
    first, second = (Episode(id=id, data={"prompt": id}) for id in "ab")
    first.finished = second.finished = math.inf
    return first, second


def changes_of(agent: Any, steps: list[tuple[Episode, Any]]) -> list[ObjectChange]:
    state = shared.State(agent, Code(agent))
    for episode, change in steps:
        change(agent)
        state.stepped(episode)
    return state.changes


def test_a_function_that_wraps_a_builtin_without_a_signature_is_no_obstacle() -> None:
    @functools.wraps(time.time)
    def wrapped(of: list[int] = []) -> float:  # noqa: B006
        return time.time()

    assert [name for name, _ in shared._kept("tools", {"clock": wrapped}, Code(object()))] == ["tools.time's default"]


def test_a_set_that_two_episodes_change_is_not_said_to_hold_one_in_place_of_the_other() -> None:
    holder: Any = Holder()
    holder.seen = set()
    steps = [(episode, lambda agent, id=episode.id: agent.seen.add(id)) for episode in episodes()]
    first, second = changes_of(holder, steps)
    assert shared._overlap(first, second) == "a changed it, and b did so while a still ran"


def test_an_agent_in_a_module_named_agent_keeps_its_own_attributes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text("class Agent:\n    current = ''\n    def __init__(self): self.task = ''\n")
    monkeypatch.syspath_prepend(tmp_path)
    first, second = episodes()
    try:
        agent = importlib.import_module("agent").Agent()
        steps = [(first, lambda a: setattr(a, "task", "one")), (second, lambda a: setattr(a, "task", "two"))]
        assert [(each.name, each.key) for each in changes_of(agent, steps)] == [("self", "'task'")] * 2
    finally:
        sys.modules.pop("agent", None)


HIDDEN = """import functools
from dataclasses import dataclass
from base_agent import Base

@dataclass(slots=True)
class Now:
    answer: str = ""

def logged(function):
    calls, last = {}, ""
    @functools.wraps(function)
    def wrapper(self, text):
        nonlocal last
        calls["last"] = last = text
        return function(self, text)
    return wrapper

class Agent(Base):
    def __init__(self):
        self.now = Now()

    @logged
    def step(self, text, seen={}):
        seen["answer"] = self.now.answer = self.state["answer"] = text
"""


def test_state_in_slots_decorators_and_a_base_class_of_another_module_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base_agent.py").write_text("class Base:\n    state = {}\n")
    (tmp_path / "my_agent.py").write_text(HIDDEN)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        agent = importlib.import_module("my_agent").Agent()
        steps = [(episode, lambda a, id=episode.id: a.step(id)) for episode in episodes()]
        changed = {each.name for each in changes_of(agent, steps)}
    finally:
        for name in ("my_agent", "base_agent"):
            sys.modules.pop(name, None)
    assert changed == {
        "base_agent.Base.state",
        "agent.now",
        "my_agent.Agent.step (wrapped)'s default.seen",
        "my_agent.Agent.step's outer variable",
        "my_agent.Agent.step's outer variable.calls",
    }


def test_an_index_that_goes_round_is_perhaps_a_counter() -> None:
    first, second = episodes()
    agent = Holder()
    steps = [(first if n % 2 else second, lambda a, n=n: setattr(a, "count", n % 3)) for n in range(1, 9)]
    changes = changes_of(agent, steps)
    assert [verdict.certain for verdict in shared.judge_changes(changes, matters=True)] == [False]
    steps = [(second, lambda a: setattr(a, "count", 17)), (first, lambda a: setattr(a, "count", 4))]
    changes = changes_of(agent, steps)
    assert [verdict.certain for verdict in shared.judge_changes(changes, matters=True)] == [True]


def test_the_answers_of_another_trainers_record_may_be_texts(tmp_path: Path) -> None:
    sequence = {
        "group_id": "g000000",
        "input_ids": [1, 2],
        "loss_mask": [False, True],
        "logprobs": [0.0, -1.0],
        "reward": 1.0,
        "interactions": ["hello", {"role": "user"}, {"completion": "bye"}],
    }
    with Writer(tmp_path / "run") as writer:
        writer.step([sequence])
    assert gateway._answers(tmp_path / "run") == ["hello", "bye"]


def test_facts_and_suspicions_about_shared_state() -> None:
    first, second = episodes()
    agent = Holder()
    changes = changes_of(
        agent,
        [
            (first, lambda a: setattr(a, "task", "one")),
            (second, lambda a: setattr(a, "task", "two")),
            (first, lambda a: a.cache.update(x="1")),
            (second, lambda a: a.cache.update(y="2")),
            (first, lambda a: setattr(a, "count", 1)),
            (second, lambda a: setattr(a, "count", 2)),
            (first, lambda a: a.history.append("one")),
            (second, lambda a: a.history.append("two")),
        ],
    )
    found = {verdict.where: verdict for verdict in shared.judge_changes(changes, matters=False)}
    assert {where: verdict.certain for where, verdict in found.items()} == {
        "agent.task": True,
        "agent.count": False,
        "agent.history": False,
    }
    assert "a left 'one' there, and b put 'two' in its place while a still ran" in found["agent.task"].evidence
    certain = {verdict.where for verdict in shared.judge_changes(changes, matters=True) if verdict.certain}
    assert certain == {"agent.task", "agent.history"}


def test_what_only_ever_grows_is_perhaps_a_statistic() -> None:
    first, second = episodes()

    def facts(*steps: int, matters: bool = False) -> list[bool]:
        made = [lambda a, step=step: setattr(a, "count", a.count + step) for step in steps]
        changes = changes_of(Holder(), list(zip((first, second) * 2, made, strict=False)))
        return [verdict.certain for verdict in shared.judge_changes(changes, matters=matters)]

    assert facts(20, 31, 7) == [False]
    assert facts(20, 31, 7, matters=True) == facts(20, -31, 7) == [True]


def test_memory_that_grows_less_with_each_wave_is_warming_up() -> None:
    def leaks(*megabytes: float) -> bool:
        samples = [Sample(episodes=32 * i, counts={"resident": mb * 2**20}) for i, mb in enumerate(megabytes)]
        return bool(growth.judge_growth(samples))

    seen = (170.5, 193.6, 201.4)
    assert leaks(*seen), "more waves decide"
    assert not leaks(*seen, 204.0)
    assert leaks(*seen, 209.2, 217.0)


def test_a_variable_that_episodes_use_in_turns() -> None:
    first, second = episodes()
    changes = changes_of(
        Holder(), [(first, lambda a: setattr(a, "task", "one")), (second, lambda a: setattr(a, "task", "two"))]
    )
    assert shared.suspects(changes) == {"task"}

    def facts(run: Callable[[Any, Episode], None], *order: Episode, matters: bool = False) -> list[bool]:
        agent = Holder()
        with Uses({"task"}, Code(agent)) as uses:
            for episode in order:
                token = agent_steps.current_episode.set(episode)
                run(agent, episode)
                agent_steps.current_episode.reset(token)
        return [verdict.certain for verdict in shared.judge_changes(changes, matters=matters, uses=uses)]

    def turn(agent: Holder, episode: Episode) -> None:
        agent.task = episode.id
        assert agent.task == episode.id

    def write(agent: Holder, episode: Episode) -> None:
        agent.task = episode.id

    def write_once(agent: Holder, episode: Episode) -> None:
        if agent.task != "none":
            assert agent.task
        else:
            agent.task = episode.id

    def read_later(agent: Holder, episode: Episode, wrote: set[Episode] = set()) -> None:  # noqa: B006
        if episode not in wrote:
            agent.task = episode.id
            wrote.add(episode)
        else:
            assert agent.task

    assert facts(turn, first, second, first) == facts(write_once, first, second) == [False]
    assert facts(read_later, first, second, first) == [True]
    assert facts(write, first, second) == [False]
    assert facts(write, first, second, matters=True) == [True], "it may have been read in another way"
    assert facts(lambda agent, episode: setattr(agent, "task", ""), first, second) == [True], "nothing was seen"


def test_a_list_is_not_used_in_turns() -> None:
    """An episode that appends to a list and reads it at once reads what others appended before."""
    first, second = episodes()
    changes = changes_of(
        Holder(), [(first, lambda a: a.history.append("one")), (second, lambda a: a.history.append("two"))]
    )
    uses = Uses({"history"}, Code(Holder()))
    for episode in (first, second):
        uses.wrote("history", episode)
    assert shared.suspects(changes) == set()
    assert [verdict.certain for verdict in shared.judge_changes(changes, matters=True, uses=uses)] == [True]


def test_a_file_that_two_write_at_once() -> None:
    (first, second), third = episodes(), Episode(id="c", data={}, started=11.0, finished=12.0)
    first.finished = second.finished = 10.0

    def found(*writers: Episode, matters: bool = True) -> list[tuple[str, bool]]:
        opened = [Written(path="/notes", where=f"agent.py:7 {each.id}", episode=each) for each in writers]
        return [(each.where, each.certain) for each in judge_written(opened, matters=matters)]

    assert found(first, second) == [("agent.py:7 b", True)]
    assert found(first, second, matters=False) == [("agent.py:7 b", False)]
    assert found(first, first) == found(second, third) == []
    line = [Written(path=f"/{n}", where="agent.py:7", episode=each) for n in range(3) for each in (first, second)]
    [verdict] = judge_written(line, matters=True)
    assert verdict.what.startswith("the file /0 and 2 more are each written by episodes that run at the same time")


def test_a_request_that_is_given_up_is_told_from_one_that_was_never_made() -> None:
    async def give_up(requests: Requests) -> dict[str, float]:
        async def ask(episode: str) -> None:
            with requests.asking(episode):
                await asyncio.sleep(60)

        gone, waiting = asyncio.ensure_future(ask("gone")), asyncio.ensure_future(ask("waiting"))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.sleep(0.01)
        given_up = requests.given_up()
        waiting.cancel()
        return given_up

    requests = Requests()
    assert set(asyncio.run(give_up(requests))) == {"gone", "waiting"}
    requests.take()
    assert requests.given_up() == {}


def test_episodes_one_after_another_may_use_the_same_attribute() -> None:
    first, second = episodes()
    steps = [(first, lambda a: setattr(a, "task", "one")), (second, lambda a: setattr(a, "task", "two"))]
    changes = changes_of(Holder(), steps)
    assert len(shared.judge_changes(changes, matters=True)) == 1
    first.finished = (changes[0].at + changes[1].at) / 2
    assert shared.judge_changes(changes, matters=True) == []
    [perhaps] = shared.judge_changes(changes, matters=True, rewards_differ=True)
    assert not perhaps.certain and "agent.task is changed by one episode after another" in perhaps.what
    assert shared.judge_changes(changes[:1], matters=True, rewards_differ=True) == []


def test_a_difference_is_the_agents_only_if_the_model_said_the_same() -> None:
    base = Behaviour(requests=[request("a", "p", "x"), request("a", "p x", "y")], reward=1.0)
    swapped = Behaviour(requests=base.requests[::-1], reward=1.0)
    other = Behaviour(requests=[request("a", "p", "x"), request("a", "p z", "y")], reward=1.0)
    model = Behaviour(requests=[request("a", "p", "w"), request("a", "p w", "y")], reward=0.0)
    rewarded = Behaviour(requests=base.requests, reward=0.5)

    def differs(behaviour: Behaviour) -> list[str]:
        return [each.what for each in repeat.differences({"a": base}, {"a": behaviour})]

    assert differs(base) == differs(swapped) == differs(model) == []
    assert differs(other) == ["request 1 differs: 'p x', then 'p z'"]
    assert differs(rewarded) == ["the reward is 1.0, then 0.5"]


def rewarded(**rewards: float) -> Wave:
    """Return a wave whose episodes made the same request and got these rewards."""
    episodes = [Episode(id, {}, finished=1.0, reward=reward) for id, reward in rewards.items()]
    return crowd(
        len(rewards), 1.0, 1.0, 0.0, episodes=episodes, requests=[request(id, "p", "x") for id in rewards], busy=0.0
    )


def test_what_one_process_showed_is_judged_although_the_other_could_not_be_run() -> None:
    crowd, origins = rewarded(a=1.0, b=1.0), Origins(Code(Holder()))
    ran = Elsewhere(tried=[([Episode("a", {}, reward=0.5)], [request("a", "p", "x")])], why_not="killed")
    [differs], [note] = judge_elsewhere(crowd, ran, origins, Sources())
    assert differs.what.startswith("1 of 1 episodes differ in another process") and "(killed)" in note
    same = Elsewhere(tried=[([Episode("a", {}, reward=1.0)], [request("a", "p", "x")])], why_not="killed")
    assert judge_elsewhere(crowd, same, origins, Sources()) == ([], [note])


def test_the_end_token_that_the_stand_in_writes_is_no_fault_of_an_agent_with_one_growing_text() -> None:
    crowd = rewarded(a=1.0, b=1.0)
    assert judge_warnings({"a branch (end token)": {"a": "why"}}, crowd, 2) == []
    [verdict] = judge_warnings({"a branch (text)": {"a": "why"}}, crowd, 2)
    assert (verdict.kind, verdict.certain) == ("rewrites", True)


def test_rewards_after_a_failure_are_counted_among_the_episodes_that_had_trouble() -> None:
    crowd = rewarded(a=1.0, b=1.0, c=1.0)
    stack = Place("mine.py:3 Mine.run", "anyio/_backends/_asyncio.py:1431 SocketStream.receive")
    crowd.waits.asked_at["a"] = stack
    [verdict] = judge_warnings({"a fault": {"a": "why"}}, crowd, 2)
    assert verdict.what.startswith("1 of 2 troubled episodes give a reward")
    assert verdict.where == "asked at mine.py:3 Mine.run"


def test_a_set_is_not_blamed_for_one_request_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sources, "lines_with_sets", lambda self: ["mine.py:3 Mine.run"])
    crowd, origins = rewarded(a=1.0), Origins(Code(Holder()))

    def where(*asked: str) -> str:
        ran = Elsewhere(tried=[([Episode("a", {}, reward=1.0)], [request("a", each, "x") for each in asked])])
        [differs], _ = judge_elsewhere(crowd, ran, origins, Sources())
        return differs.where

    assert where("p", "p") == "" and where("q") == "mine.py:3 Mine.run"


def test_episodes_that_differ_are_counted_among_those_that_were_compared() -> None:
    code = Code(Holder())
    alone, crowd = rewarded(a=1.0), rewarded(a=1.0, b=1.0, c=1.0)
    waves = [rewarded(a=0.0), alone, crowd, crowd, crowd]
    verdicts, _ = judge(waves, Origins(code), shared.State(Holder(), code))
    assert not [each for each in verdicts if each.kind == "blocks"]
    [differs] = [each for each in verdicts if each.kind == "differs"]
    assert differs.what.startswith("1 of 1 episodes differ when")


def test_a_model_that_answers_by_chance_is_no_difference_of_the_agents() -> None:
    def found(first: list[tuple[str, str]], second: list[tuple[str, str]], *rewards: Any) -> list[str]:
        told = [
            {"a": Behaviour(requests=[request("a", *each) for each in exchanges], reward=reward)}
            for exchanges, reward in zip((first, second), rewards or (0.0, 0.0), strict=True)
        ]
        return [each.what for each in repeat.differences(*told)] or [f"chance {repeat.by_chance(*told)}"]

    chance = ["chance ['a']"]
    assert found([("p", "good")], [("p", "bad"), ("p", "good")]) == chance  # it asks until it likes the answer
    assert found([("p", "x"), ("p", "y")], [("p", "y"), ("p", "x")], 1.0, 0.0) == chance  # the first one counts
    side_by_side = [("s", "1"), ("l", "2"), ("l 2", "3"), ("s 1", "4")]
    assert found(side_by_side, [("s", "1"), ("s 1", "4"), ("l", "x"), ("l x", "5")]) == chance
    assert found(side_by_side, [("l", "2"), ("s", "1"), ("s 1", "4"), ("l 2", "3")]) == ["chance []"]
    assert found([("p", "x")], [("p", "x"), ("p", "x")]) == ["1 request, then 2"]
    assert found([("p", "x"), ("q", "y")], [("p", "x"), ("r", "y")]) == ["request 1 differs: 'q', then 'r'"]


def test_a_reward_may_be_named_by_an_id_that_was_drawn_by_chance() -> None:
    def told(id: str, reward: float) -> dict[str, Behaviour]:
        asked = Request(episode="a", asked="p", answered="x", came=0.0, done=1.0, id=id)
        return {"a": Behaviour(requests=[asked], reward={id: reward})}

    assert repeat.differences(told("chatcmpl-1", 1.0), told("chatcmpl-2", 1.0)) == []
    (found,) = repeat.differences(told("chatcmpl-1", 1.0), told("chatcmpl-2", 0.5))
    assert found.what == "the reward is {'chatcmpl-1': 1.0}, then {'chatcmpl-2': 0.5}"


def test_a_loop_is_not_blamed_for_threads_that_have_the_interpreter() -> None:
    end = threading.Event()

    def burn() -> None:
        while not end.is_set():
            sum(range(1000))

    async def idle() -> list[watch.Block]:
        async with watch.LoopWatch(Code(Holder())) as loop_watch:
            threads = [threading.Thread(target=burn) for _ in range(4)]
            for thread in threads:
                thread.start()
            for _ in range(20):
                await asyncio.sleep(0.01)
            end.set()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            return loop_watch.take()

    assert watch.judge_blocks(asyncio.run(idle()), 0.2) == []


@pytest.mark.parametrize(("watched_s", "named"), [(1.0, False), (0.5, True)])
def test_a_line_that_a_library_serves_in_many_places_is_one(watched_s: float, named: bool) -> None:
    blocks = [
        watch.Block(
            place=Place("agent.py:7 run", f"encoder.py:{line} dumps"), seconds=0.02 + line / 1000, computing=True
        )
        for line in range(4)
    ]
    verdicts = watch.judge_blocks(blocks, watched_s)
    assert [verdict.where for verdict in verdicts] == ["agent.py:7 run, in encoder.py:3 dumps"] * named
    assert [verdict.evidence[0][:39] for verdict in verdicts] == ["4 times, 0.09 s in all (17% of the time"] * named


@pytest.mark.parametrize(("seconds", "named"), [([0.01], False), ([0.01, 0.01], True), ([0.06], True)])
def test_a_short_block_is_named_if_it_was_seen_twice(seconds: list[float], named: bool) -> None:
    place = Place("agent.py:7 run", "threading.py:327 wait")
    blocks = [watch.Block(place=place, seconds=each, computing=False) for each in seconds]
    assert bool(watch.judge_blocks(blocks, 0.2)) == named


def test_a_process_is_a_block_unless_it_is_started_the_asynchronous_way() -> None:
    async def run() -> None:
        subprocess.run(["sleep", "0.3"], check=True, capture_output=True)  # noqa: ASYNC221

    async def start() -> None:
        process = await asyncio.create_subprocess_exec("sleep", "0.3")
        await process.wait()

    async def watched(call: Callable[[], Coroutine[Any, Any, None]]) -> list[watch.Block]:
        async with watch.LoopWatch(Code(Holder())) as loop_watch:
            await asyncio.gather(*(call() for _ in range(3)))
        return loop_watch.take()

    (verdict,) = watch.judge_blocks(asyncio.run(watched(run)), 1.0)
    assert "test_judgements.py" in verdict.where and verdict.what == "blocks the event loop"
    assert watch.judge_blocks(asyncio.run(watched(start)), 0.3) == []


def test_a_block_is_timed_and_placed() -> None:
    async def block() -> list[watch.Block]:
        async with watch.LoopWatch(Code(Holder())) as loop_watch:
            await asyncio.sleep(0.02)
            for _ in range(2):
                time.sleep(0.1)  # noqa: ASYNC251
                await asyncio.sleep(0.02)
            return loop_watch.take()

    blocks = asyncio.run(block())
    (verdict,) = watch.judge_blocks(blocks, 0.3)
    assert "test_judgements.py" in verdict.where
    assert verdict.evidence[0].startswith("2 times")
    assert sum(each.seconds for each in blocks) == pytest.approx(0.2, abs=0.06)


def test_a_running_coroutine_is_not_asked_what_it_awaits() -> None:
    """Python 3.11 may crash at that."""

    async def waiting() -> None:
        await asyncio.sleep(0)

    coroutine = waiting()

    class Running:
        cr_running, cr_frame, cr_code = True, coroutine.cr_frame, coroutine.cr_code

        @property
        def cr_await(self) -> None:
            raise AssertionError("it was asked")

    assert [code.co_name for code, _ in stack_of_coroutine(Running())] == ["waiting"]
    coroutine.send(None)
    assert [code.co_name for code, _ in stack_of_coroutine(coroutine)] == ["__sleep0", "sleep", "waiting"]
    coroutine.close()


def test_what_changes_after_the_stress_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    async def changes() -> list[Any]:
        async with ProcessState(Code(object())) as state:
            pass
        monkeypatch.setenv("CLEW_TEST_AFTER", "1")
        state.stepped(Episode("g0.e0", {}))
        return state.changes

    assert asyncio.run(changes()) == []


def test_any_call_that_changes_the_process_does_what_it_does_without_the_stress() -> None:
    number = signal.SIGRTMIN + 1  # it has no name

    async def changes() -> None:
        async with ProcessState(Code(test_three_outcomes)):
            signal.signal(number, signal.SIG_IGN)
            signal.signal(handler=signal.SIG_DFL, signalnum=number)
            with pytest.raises(TypeError):
                os.chdir()  # type: ignore[call-arg]

    asyncio.run(changes())


def test_three_outcomes() -> None:
    certain = Verdict(kind="serial", what="waits")
    perhaps = replace(certain, certain=False)

    def outcome(verdicts: list[Verdict], notes: list[str]) -> str:
        return Report(
            agent="a", batch=1, group=1, dp=1, width=1, rows=1, rows_used=1, waves=[], failures=[], growth=[],
            verdicts=verdicts, notes=notes,
        ).outcome  # fmt: skip

    assert outcome([], []) == outcome([perhaps], []) == "fit"
    assert outcome([certain], []) == outcome([certain], ["why"]) == "not fit"
    assert outcome([], ["why"]) == outcome([perhaps], ["why"]) == "not judged"


def test_time_that_another_episode_holds_the_loop_is_no_reward() -> None:
    episode = Episode(id="a", data={}, started=10.0, finished=20.0, code_s=0.5)
    asked = [request("a", "", "", came=11, done=13), request("a", "", "", came=14, done=16)]
    free = seconds_of_parts(episode, asked, [])
    assert free == {"episode": 10, "model": 4, "agent code": 0.5, "tools": 1.5, "reward": 4, "blocked": 0}
    holds = [(5.0, 10.5), (12.0, 13.5), (15.0, 18.0), (19.5, 30.0)]  # before, beside and after the model's answers
    held = seconds_of_parts(episode, asked, holds)
    assert held == {"episode": 10, "model": 4, "agent code": 0.5, "tools": 0.5, "reward": 1.5, "blocked": 3.5}


def test_a_lock_is_found_beside_a_busy_processor_and_a_busy_processor_is_no_lock() -> None:
    alone, narrow = crowd(1, 1.0, 1.0, 0.0), crowd(4, 4.0, 2.5, 1.5)
    held = crowd(16, 40.0, 21.0, 20.0, busy=0.6)  # 16 s of sleep under a lock, and 24 s without a processor
    assert serial.verdict(alone, narrow, held) is not None
    starved = crowd(16, 16.0, 8.5, 7.5, busy=0.92)
    assert serial.verdict(alone, narrow, starved) is None and serial.slows(narrow, starved)


def test_a_row_that_takes_long_is_no_lock() -> None:
    alone, narrow = crowd(1, 1.0, 1.0, 0.0), crowd(4, 1.0, 1.0, 0.0)
    wide = crowd(16, 10.0, 1.0, 0.6)
    wide.episodes[-1].finished = 10.0
    assert serial.verdict(alone, narrow, wide) is None


def test_a_pool_that_closes_connections_hides_no_leak() -> None:
    pool, leaked = [2, 16, 4, 9, 1], [2, 10, 18, 22, 26]
    samples = [
        Sample(
            episodes=episodes,
            counts={"sockets": a + b},
            examples={"sockets": "connected at agent.py:3 ask"},
            by_line={"sockets": {"agent.py:3 ask": a, "agent.py:9 run": b}},
        )
        for episodes, a, b in zip([2, 10, 18, 22, 26], pool, leaked, strict=True)
    ]
    assert grows(samples, "sockets") is None
    (found,) = growth.judge_growth(samples)
    assert (
        found.where == "connected at agent.py:9 run"
        and found.what == "sockets left behind: +1.0 sockets with every episode"
    )


def test_text_of_another_row() -> None:
    rows_ = [Episode(id=id, data={"prompt": f"Where is {town} today?"}) for id, town in zip("ab", ("Rome", "Oslo"))]  # noqa: B905
    own = [request(each.id, f"user {each.data['prompt']}", "x") for each in rows_]
    assert crossed_rows(rows_, own) == []
    (found,) = crossed_rows(rows_, [*own, request("b", "user Where is Rome today?", "x")])
    assert (found.asker, found.owner, found.text) == ("b", "a", "Where is Rome today?")
    quoted = [request("b", "user hello", "Where is Rome today?"), request("b", "user Where is Rome today?", "x")]
    assert crossed_rows(rows_, quoted) == []


def test_a_dictionary_is_one_finding_and_its_line_is_named() -> None:
    first, second = episodes()

    def put(episode: Episode, value: str) -> tuple[Episode, Callable[[Any], None]]:
        return episode, lambda a: a.cache.update({f"k{number}": value for number in range(11)})

    agent = Holder()
    steps = [put(first, "one"), put(second, "two"), put(first, "three")]
    (found,) = shared.judge_changes(
        changes_of(agent, steps), matters=True, sources=Sources(files=[__file__], classes=["Holder"])
    )
    assert found.certain and found.where.startswith("agent.cache.k") and "test_judgements.py" in found.where
    assert any("10 more of agent.cache" in line for line in found.evidence)


def test_a_thread_that_sleeps_in_a_call_is_told_from_one_that_waits_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    sleeper = threading.Thread(target=time.sleep, args=(0.5,), daemon=True)
    waiter = threading.Thread(target=lock.acquire, daemon=True)
    hears = threading.Event()
    hearer = threading.Thread(target=hears.wait, daemon=True)
    for thread in (sleeper, waiter, hearer):
        thread.start()
    time.sleep(0.1)
    assert sleeps_in_a_call(sleeper.native_id or 0) and not sleeps_in_a_call(waiter.native_id or 0)
    told = stack_of_thread(hearer.ident or 0)
    assert sleeps_in_a_call(hearer.native_id or 0, told), "threading's own wait is not the interpreter's"
    hears.set()
    lock.release()


def test_a_loop_that_waits_for_a_worker_is_blocked() -> None:
    with ThreadPoolExecutor(1) as pool:

        async def block() -> list[watch.Block]:
            async with watch.LoopWatch(Code(Holder())) as loop_watch:
                await asyncio.sleep(0.02)
                pool.submit(time.sleep, 0.3).result()
                await asyncio.sleep(0.02)
                return loop_watch.take()

        (verdict,) = watch.judge_blocks(asyncio.run(block()), 0.4)
    assert "test_judgements.py" in verdict.where and verdict.what == "blocks the event loop"


def test_a_report_with_open_files_is_json() -> None:
    sample = Sample(episodes=2, counts={"files": 1.0}, by_line={"files": {"agent.py:3 ask": 1}})
    assert json.loads(json.dumps(asdict(sample)))["by_line"] == {"files": {"agent.py:3 ask": 1}}


def test_many_short_blocks_that_take_most_of_the_time_are_suspicious() -> None:
    def held(each_s: float) -> list[Verdict]:
        """Eight episodes of one second; each holds the event loop once, and the model answers after a tenth."""
        episodes = [
            Episode(f"e{n}", {}, finished=1.0, holds=[(0.1 + n * each_s, 0.1 + (n + 1) * each_s)]) for n in range(8)
        ]
        requests = [request(each.id, "p", "x", done=0.1) for each in episodes]
        wave = crowd(8, 1.0, 1.0, 0.0, episodes=episodes, requests=requests)
        return _held(wave, wave)

    [verdict] = held(0.1)
    assert (verdict.kind, verdict.certain) == ("blocks", False) and "for 70% of their time" in verdict.what
    assert held(0.05) == []
