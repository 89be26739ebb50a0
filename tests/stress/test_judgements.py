"""The parts of the stress that judge, with numbers made by hand."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from clew.diagnose.stress import files, growth, repeat, serial, shared, watch
from clew.diagnose.stress.frames import Code, Place
from clew.diagnose.stress.growth import Sample, grows
from clew.diagnose.stress.repeat import Told
from clew.diagnose.stress.requests import Noted, Request, Requests
from clew.diagnose.stress.serial import Crowd
from clew.diagnose.stress.shared import Change
from clew.diagnose.stress.standin import StandIn
from clew.diagnose.stress.steps import Episode
from clew.inference.protocol import Completion, SamplingParams
from tests.models import tiny_tokenizer

PARAMS = SamplingParams(max_new_tokens=40)


def request(episode: str, asked: str, answered: str, came: float = 0.0, done: float = 1.0) -> Request:
    return Request(episode=episode, asked=asked, answered=answered, came=came, done=done)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_the_stand_in_tells_an_episode_the_same_again_and_no_two_the_same(tokenizer: Any) -> None:
    engine = StandIn(tokenizer, latency_s=0, tokens=40)

    async def ask(name: str, ids: list[int]) -> Completion:
        return await engine.generate(ids, PARAMS, request_id=name)

    async def ask_all() -> list[list[int]]:
        names = [("a.i0", [7]), ("a.i1", [7]), ("a.i2", [8]), ("b.i0", [7])]
        return [(await ask(*each)).output_ids for each in names]

    first, second = asyncio.run(ask_all()), asyncio.run(ask_all())
    assert first == second
    assert len({tuple(ids) for ids in first}) == 4
    assert all(ids[-1] == tokenizer.eos_token_id and 20 <= len(ids) <= 40 for ids in first)


def test_recorded_texts_latency_limit_and_notes(tokenizer: Any) -> None:
    requests = Requests()
    texts = ("one", "two")
    engine = Noted(StandIn(tokenizer, latency_s=0.02, token_s=0.005, texts=texts, limit=1), tokenizer, requests)

    async def ask() -> None:
        await asyncio.gather(*(engine.generate([9, 9], PARAMS, request_id=f"e{i}.i0") for i in range(8)))

    began = time.monotonic()
    asyncio.run(ask())
    noted = requests.take()
    assert time.monotonic() - began >= 8 * 0.04
    assert {each.answered for each in noted} == set(texts)
    assert sorted(each.episode for each in noted) == [f"e{i}" for i in range(8)]
    assert all(each.done - each.came >= 0.04 for each in noted)
    assert requests.take() == []
    short = asyncio.run(engine.generate([9], SamplingParams(max_new_tokens=2), request_id="x.i0"))
    assert (len(short.output_ids), short.finish_reason) == (2, "length")


@pytest.mark.parametrize(
    ("counts", "slope"),
    [
        ([5, 15, 25, 35], 1.0),
        ([5, 6, 7, 8], 0.1),
        ([0, 10, 10, 10], None),  # warms up
        ([0, 10, 15, 16], None),  # levels off
        ([3, 0, 4, 1], None),  # noise
        ([0, 10], None),  # too few to tell
    ],
)
def test_steady_growth(counts: list[int], slope: float | None) -> None:
    samples = [Sample(episodes=10 * i, counts={"tasks": count}) for i, count in enumerate(counts)]
    found = grows(samples, "tasks")
    assert found == (pytest.approx(slope) if slope is not None else None)
    assert len(growth.verdicts(samples)) == (slope is not None)


def test_concurrency_of_intervals() -> None:
    intervals = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]
    assert serial.concurrency(intervals) == [(0.0, 1), (1.0, 2), (2.0, 1), (3.0, 0), (5.0, 1), (6.0, 0)]
    assert serial.union(intervals) == 4.0


def crowd(width: int, seconds: float, mean_s: float, waited: float, busy: float = 0.1, model_s: float = 1.0) -> Crowd:
    return Crowd(
        width=width,
        seconds=seconds,
        episodes=width,
        mean_s=mean_s,
        model_s=model_s,
        waits={Place("lock"): waited, Place("elsewhere"): 1.0},
        busy_share=busy,
    )


def test_a_lock_is_where_the_additional_time_is_spent() -> None:
    alone, narrow = crowd(1, 1.0, 1.0, 0.0), crowd(4, 4.0, 2.5, 1.5)
    found = serial.verdict(alone, narrow, crowd(16, 16.0, 8.5, 7.5))
    assert found is not None
    assert (found.kind, found.where) == ("serial", "lock")
    assert "throughput stops at 1 " in found.what
    assert serial.verdict(alone, crowd(4, 1.0, 1.0, 0.0), crowd(16, 1.1, 1.05, 0.0)) is None
    assert serial.verdict(alone, narrow, crowd(16, 16.0, 8.5, 7.5, busy=0.9)) is None  # the processor's doing
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
    assert [(each.asker, each.owner) for each in shared.crossings(requests)] == [("b", "a")]
    assert shared.crossings(requests, lambda episode, text: episode == "b" and text in secret + common) == []
    longer = [*requests, request("b", "Once more?", f"So: {secret}", 1, 2)]
    assert shared.crossings(longer) == []
    quoting = [request("a", secret, secret, 0, 1), request("b", secret, "", 2, 3)]
    assert shared.crossings(quoting) == []


class Holder:
    def __init__(self) -> None:
        self.task = "none"
        self.cache: dict[str, str] = {}
        self.count = 0
        self.history: list[str] = []


def episodes() -> tuple[Episode, Episode]:
    first, second = (Episode(id=id, data={"prompt": id}) for id in "ab")
    first.finished = second.finished = 10.0
    return first, second


def changes_of(agent: Any, steps: list[tuple[Episode, Any]]) -> list[Change]:
    state = shared.State(agent, Code(agent))
    for episode, change in steps:
        change(agent)
        state.stepped(episode)
    return state.changes


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
    found = {verdict.where: verdict for verdict in shared.verdicts(changes, matters=False)}
    assert {where: verdict.certain for where, verdict in found.items()} == {
        "agent.task": True,
        "agent.count": False,
        "agent.history": False,
    }
    assert "a left 'one' there, and b put 'two' in its place while a still ran" in found["agent.task"].evidence
    certain = {verdict.where for verdict in shared.verdicts(changes, matters=True) if verdict.certain}
    assert certain == {"agent.task", "agent.history"}


def test_what_only_ever_grows_is_perhaps_a_statistic() -> None:
    first, second = episodes()

    def facts(*steps: int, matters: bool = False) -> list[bool]:
        made = [lambda a, step=step: setattr(a, "count", a.count + step) for step in steps]
        changes = changes_of(Holder(), list(zip((first, second) * 2, made, strict=False)))
        return [verdict.certain for verdict in shared.verdicts(changes, matters=matters)]

    assert facts(20, 31, 7) == [False]
    assert facts(20, 31, 7, matters=True) == facts(20, -31, 7) == [True]


def test_a_file_that_two_write_at_once() -> None:
    (first, second), third = episodes(), Episode(id="c", data={}, started=11.0, finished=12.0)

    def found(*writers: Episode, matters: bool = True) -> list[tuple[str, bool]]:
        opened = [files.Opened(path="/notes", where=f"agent.py:7 {each.id}", episode=each) for each in writers]
        return [(each.where, each.certain) for each in files.verdicts(opened, matters=matters)]

    assert found(first, second) == [("agent.py:7 b", True)]
    assert found(first, second, matters=False) == [("agent.py:7 b", False)]
    assert found(first, first) == found(second, third) == []


def test_episodes_one_after_another_may_use_the_same_attribute() -> None:
    first, second = episodes()
    second.started = 11.0
    steps = [(first, lambda a: setattr(a, "task", "one")), (second, lambda a: setattr(a, "task", "two"))]
    assert shared.verdicts(changes_of(Holder(), steps), matters=True) == []


def test_a_difference_is_the_agents_only_if_the_model_said_the_same() -> None:
    base = Told(requests=[request("a", "p", "x"), request("a", "p x", "y")], reward=1.0)
    swapped = Told(requests=base.requests[::-1], reward=1.0)
    other = Told(requests=[request("a", "p", "x"), request("a", "p z", "y")], reward=1.0)
    model = Told(requests=[request("a", "p", "w"), request("a", "p w", "y")], reward=0.0)
    rewarded = Told(requests=base.requests, reward=0.5)

    def differs(told: Told) -> list[str]:
        return [each.what for each in repeat.differences({"a": base}, {"a": told})]

    assert differs(base) == differs(swapped) == differs(model) == []
    assert differs(other) == ["request 1 differs: 'p x', then 'p z'"]
    assert differs(rewarded) == ["the reward is 1.0, then 0.5"]


def test_a_model_that_answers_by_chance_is_no_difference_of_the_agents() -> None:
    def found(first: list[tuple[str, str]], second: list[tuple[str, str]], *rewards: Any) -> list[str]:
        told = [
            {"a": Told(requests=[request("a", *each) for each in exchanges], reward=reward)}
            for exchanges, reward in zip((first, second), rewards or (0.0, 0.0), strict=True)
        ]
        return [each.what for each in repeat.differences(*told)] or [f"chance {repeat.by_chance(*told)}"]

    chance = ["chance ['a']"]
    assert found([("p", "good")], [("p", "bad"), ("p", "good")]) == chance  # it asks until it likes the answer
    assert found([("p", "x"), ("p", "y")], [("p", "y"), ("p", "x")], 1.0, 0.0) == chance  # the first one counts
    side_by_side = [("s", "1"), ("l", "2"), ("l 2", "3"), ("s 1", "4")]
    assert found(side_by_side, [("s", "1"), ("s 1", "4"), ("l", "x"), ("l x", "5")]) == chance
    assert found(side_by_side, [("l", "2"), ("s", "1"), ("s 1", "4"), ("l 2", "3")]) == ["chance []"]
    assert found([("p", "x")], [("p", "x"), ("p", "x")]) == ["1 requests, then 2"]
    assert found([("p", "x"), ("q", "y")], [("p", "x"), ("r", "y")]) == ["request 1 differs: 'q', then 'r'"]


def test_a_reward_may_be_named_by_an_id_that_was_drawn_by_chance() -> None:
    def told(id: str, reward: float) -> dict[str, Told]:
        asked = Request(episode="a", asked="p", answered="x", came=0.0, done=1.0, id=id)
        return {"a": Told(requests=[asked], reward={id: reward})}

    assert repeat.differences(told("chatcmpl-1", 1.0), told("chatcmpl-2", 1.0)) == []
    (found,) = repeat.differences(told("chatcmpl-1", 1.0), told("chatcmpl-2", 0.5))
    assert found.what == "the reward is {'chatcmpl-1': 1.0}, then {'chatcmpl-2': 0.5}"


def test_a_loop_is_not_blamed_for_threads_that_have_the_interpreter() -> None:
    end = threading.Event()

    def burn() -> None:
        while not end.is_set():
            sum(range(1000))

    async def idle() -> watch.Watched:
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

    assert watch.verdicts(asyncio.run(idle())) == []


def test_a_line_that_a_library_serves_in_many_places_is_one() -> None:
    blocks = [
        watch.Block(
            place=Place("agent.py:7 run", f"encoder.py:{line} dumps"), seconds=0.02 + line / 1000, computing=True
        )
        for line in range(4)
    ]
    (verdict,) = watch.verdicts(watch.Watched(blocks=blocks, seconds=1.0, late_share=0.1))
    assert verdict.where == "agent.py:7 run, in encoder.py:3 dumps"
    assert verdict.evidence[0].startswith("4 times, 0.09 s in all (9% of the time)")


def test_a_process_is_a_block_unless_it_is_started_the_asynchronous_way() -> None:
    async def run() -> None:
        subprocess.run(["sleep", "0.3"], check=True, capture_output=True)  # noqa: ASYNC221

    async def start() -> None:
        process = await asyncio.create_subprocess_exec("sleep", "0.3")
        await process.wait()

    async def watched(call: Callable[[], Coroutine[Any, Any, None]]) -> watch.Watched:
        async with watch.LoopWatch(Code(Holder())) as loop_watch:
            await asyncio.gather(*(call() for _ in range(3)))
        return loop_watch.take()

    (verdict,) = watch.verdicts(asyncio.run(watched(run)))
    assert "test_judgements.py" in verdict.where and verdict.what == "blocks the event loop"
    assert watch.verdicts(asyncio.run(watched(start))) == []


def test_a_block_is_timed_and_placed() -> None:
    async def block() -> watch.Watched:
        async with watch.LoopWatch(Code(Holder())) as loop_watch:
            await asyncio.sleep(0.02)
            for _ in range(2):
                time.sleep(0.1)  # noqa: ASYNC251
                await asyncio.sleep(0.02)
            return loop_watch.take()

    watched = asyncio.run(block())
    (verdict,) = watch.verdicts(watched)
    assert "test_judgements.py" in verdict.where
    assert verdict.evidence[0].startswith("2 times")
    assert sum(each.seconds for each in watched.blocks) == pytest.approx(0.2, abs=0.06)
