"""Agents in the place of a workflow: through the gateway, into the record."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import clew
from clew.config import Config
from clew.errors import ConfigError
from clew.gateway.turn_returns import turn_returns
from clew.launch.preflight import check_named
from clew.record.rows import Sequence, from_table, read_table
from clew.record.run import RunDirectory
from clew.rollout import agents
from clew.rollout.process import gateway_for
from clew.rollout.runner import RolloutRunner
from clew.view.status import status_table
from clew.waits import Reporter
from tests.gateway.chatml import chatml_tokenizer
from tests.gateway.spoken import Spoken
from tests.models import tiny_model
from tests.rollout.scripted import ROWS, config_for
from tests.rollout.user_agents import HELD, LEFT


async def rolled_out(
    tmp_path: Path, agent: str, turn_discount: float = 1.0, **rollout: Any
) -> tuple[list[Sequence], RunDirectory]:
    """The rows of the first batch, or of what was rejected."""
    section = {"agent": f"tests.rollout.user_agents.{agent}", "reward": None, "max_failed_share": 1.0, **rollout}
    sections = {"rollout": section, "reward": {"turn_discount": turn_discount}, "launch": {"mode": "local"}}
    config: Config = config_for(tmp_path, **sections)
    tokenizer = chatml_tokenizer(tmp_path / "tokenizer")
    engine = Spoken(tokenizer, lambda prompt: "hello<|im_end|>")
    run = RunDirectory(config.run_path)
    run.inbox.publish(0)
    gateway = gateway_for(config)
    assert gateway is not None
    with Reporter(run.status, "rollout") as reporter:
        runner = RolloutRunner(config, run, engine, tokenizer, ROWS, [], reporter, gateway)
        try:
            while not {"g000000", "g000001", "g000002"} <= run.inbox.names() | run.rejected_groups():
                await asyncio.wait_for(runner.advance(), 20)
        finally:
            await runner.close()
            gateway.stop()
    tables = list(run.inbox.scan().values()) or [read_table(path) for path in run.rejected.glob("*.parquet")]
    return [row for table in tables for row in from_table(table)], run


@pytest.mark.parametrize(
    ("give", "reward"), [("number", 0.5), ("bool", 1.0), ("numpy", 0.25), ("by id", 2.0), ("leave", 1.0)]
)
def test_what_an_agent_may_return(tmp_path: Path, give: str, reward: float) -> None:
    rows, _ = asyncio.run(rolled_out(tmp_path, "Once", workflow_kwargs={"give": give}))
    assert {row.reward for row in rows} == {reward} and all(row.error is None for row in rows)
    assert all(row.data["prompt"].endswith("=") for row in rows), "each episode has its own copy"
    assert all(row.interactions[0]["model"] == "policy" for row in rows)
    assert all(row.loss_mask.sum() == len("hello") + 1 for row in rows)


def test_every_agent_may_enter_and_leave_the_shared_client() -> None:
    async def episodes() -> None:
        client = agents.SharedClient()
        async with client, client:
            pass
        async with client:
            assert not client.is_closed
        await client.really_close()
        assert client.is_closed

    asyncio.run(episodes())


@pytest.mark.parametrize(
    ("give", "said"),
    [
        ("none", "returned None"),
        ("nothing by id", "returned {}; expected at least one number"),
        ("text", "returned 'good'"),
        ("array", "ndarray"),
        ("nan", "nan"),
        ("raise", "RuntimeError: planted"),
        ("by unknown id", "'i7', which is not the id of any response in this episode (ids: g"),
    ],
)
def test_what_an_agent_may_not_return_is_a_failed_episode_that_says_so(tmp_path: Path, give: str, said: str) -> None:
    rows, _ = asyncio.run(rolled_out(tmp_path, "Once", workflow_kwargs={"give": give}))
    assert all(said in (row.error or "") for row in rows)


def test_an_agent_that_never_returns(tmp_path: Path) -> None:
    rows, _ = asyncio.run(rolled_out(tmp_path, "Once", workflow_kwargs={"give": "never"}, episode_timeout_s=0.5))
    said = "EpisodeError: tests.rollout.user_agents.Once.run was cancelled after 0.5 s (rollout.episode_timeout_s)."
    assert {row.error for row in rows} == {f"{said} The model had given 1 response."}


def test_a_plain_function_that_never_returns_keeps_no_process_alive(tmp_path: Path) -> None:
    rows, _ = asyncio.run(rolled_out(tmp_path, "PlainNever", episode_timeout_s=0.5))
    HELD.set()
    assert all("cancelled after 0.5 s" in (row.error or "") for row in rows)


def test_an_agent_that_catches_its_cancellation_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agents, "CANCEL_S", 0.1)
    rows, _ = asyncio.run(rolled_out(tmp_path, "Stubborn", episode_timeout_s=0.5))
    assert all("cancelled after 0.5 s" in (row.error or "") for row in rows)
    assert "Do not swallow CancelledError." in caplog.text


def test_branched_episodes_are_counted_in_the_status_and_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, run = asyncio.run(rolled_out(tmp_path, "Clock"))
    marked = [[each.get("branch", {}).get("message") for each in row.interactions] for row in rows]
    assert sorted(map(str, marked)) == sorted(["[None]", "[1]"] * (len(rows) // 2))
    [warning] = [line for line in caplog.messages if "does not continue" in line]
    assert 'message 1 (system) differs at character 7: "It is 0 o\'clock." became' in warning
    assert warning.endswith("(further warnings of this kind are not shown)")
    terminal = io.StringIO()
    Console(width=200, file=terminal).print(status_table(run))
    assert re.search(r"rollout: (\d+) of \1 episodes branched \(100%\)", terminal.getvalue())
    rows, run = asyncio.run(rolled_out(tmp_path / "sound", "Turns"))
    Console(width=200, file=(sound := io.StringIO())).print(status_table(run))
    assert "branched" not in sound.getvalue()


@pytest.mark.parametrize("agent", ["Plain", "Blocking", "Decorated"])
def test_agents_that_block(tmp_path: Path, agent: str) -> None:
    rows, _ = asyncio.run(rolled_out(tmp_path, agent))
    assert {row.reward for row in rows} == {1.0}


def test_a_task_that_is_left_behind_is_refused_later(tmp_path: Path) -> None:
    LEFT.clear()

    async def both() -> list[Any]:
        gone = asyncio.ensure_future(rolled_out(tmp_path, "Once", workflow_kwargs={"give": "leave"}))
        await gone
        return await asyncio.gather(*LEFT, return_exceptions=True)

    said = asyncio.run(both())
    assert said and all(isinstance(each, Exception) for each in said)


def test_rewards_of_turns_become_returns(tmp_path: Path) -> None:
    rows, _ = asyncio.run(rolled_out(tmp_path, "Turns", sequences="individual"))
    assert len(rows) == 2 * 3 * len({row.group_id for row in rows})
    assert {row.reward for row in rows} == {1.0}, "each turn is worth what came after it, undiscounted"
    joined, _ = asyncio.run(rolled_out(tmp_path / "joined", "Turns"))
    assert all(row.reward == 1.0 and len(row.interactions) == 3 for row in joined)
    assert [each["reward"] for each in joined[0].interactions] == [0.0, 0.0, 1.0]


def test_a_filter_names_the_returns_that_it_compares(tmp_path: Path) -> None:
    filtered, _ = asyncio.run(rolled_out(tmp_path, "Turns", turn_discount=0.5, drop_equal_rewards=True))
    assert {(row.reward, row.error) for row in filtered} == {(0.25, "filtered: all rewards equal (0.25)")}


def test_a_limit_of_turns_is_said_on_the_record(tmp_path: Path) -> None:
    rows, _ = asyncio.run(rolled_out(tmp_path, "Turns", max_turns=2))
    assert all("it has used its 2 requests" in (row.error or "") for row in rows)
    assert all(len(row.interactions) == 2 for row in rows)


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"agent": "tests.rollout.user_agents.asked"}, "is no agent"),
        ({"agent": "tests.rollout.user_agents.Missing"}, "no 'Missing'"),
        ({"agent": "tests.rollout.user_agents.Once", "workflow_kwargs": {"gve": 1}}, "Did you mean 'give'"),
    ],
)
def test_what_is_no_agent(tmp_path: Path, rollout: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        asyncio.run(rolled_out(tmp_path, rollout.pop("agent").removeprefix("tests.rollout.user_agents."), **rollout))


@pytest.mark.parametrize("rollout", [{"agent": "a.B", "workflow": "c.D"}, {"max_turns": 3}, {"max_episode_tokens": 3}])
def test_contradictory_configuration(tmp_path: Path, rollout: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Unset"):
        config_for(tmp_path, rollout=rollout)


def test_a_reward_that_no_agent_would_call_is_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 ="}')
    named: dict[str, Any] = {"agent": "tests.rollout.user_agents.Once", "reward": "tests.rollout.user_code.exact"}
    with pytest.raises(ConfigError, match=r"rollout\.reward=.*exact: the agent .*Once gives its own"):
        check_named(config_for(tmp_path, rollout=named, data={"path": str(rows)}))
    with pytest.raises(ConfigError, match="gives its own rewards"):
        clew.rollout_batch([{"prompt": "1 + 1 ="}], model=str(tmp_path / "model"), **named)
    own = {"workflow": "tests.rollout.user_code.Returns", "reward": "tests.rollout.user_code.exact"}
    check_named(config_for(tmp_path, rollout=own, data={"path": str(rows)}))


class Said:
    """Return as much of an interaction as returns need."""

    def __init__(self, id: str, index: int, follows: str | None = None) -> None:
        self.id, self.index, self.details = id, index, {} if follows is None else {"follows": follows}


def test_returns_walk_the_turn_tree_from_its_leaves() -> None:
    a, b, c, d = Said("a", 0), Said("b", 1), Said("c", 2), Said("d", 3, follows="a")
    chains: Any = [[a, b, c], [d]]
    assert turn_returns(chains, 1.0, {}, 1.0) == {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
    twigs: Any = [[a, Said(name, number, follows="a")] for number, name in enumerate("xyz", 1)]
    assert set(turn_returns(twigs, 0.7, {}, 1.0).values()) == {0.7}  # exactly: rewards are compared for equality
    # c = 1; b = 0.5 + 0.5 * 1; d = 2 + 1; a = 0.5 * (1 + 3) / 2
    assert turn_returns(chains, 1.0, {"b": 0.5, "d": 2.0}, 0.5) == {"c": 1.0, "b": 1.0, "d": 3.0, "a": 1.0}


def test_an_agent_trains_inline_and_its_record_replays(tmp_path: Path) -> None:
    from clew.diagnose.rerun import Options, rerun
    from clew.loop.trainer_process import learn_inline
    from tests.models import tiny_model, tiny_tokenizer

    tiny_model(tmp_path / "model", context=64)
    tiny_tokenizer(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = config_for(
        tmp_path,
        data={"path": str(rows)},
        rollout={"agent": "tests.rollout.user_agents.Blocking", "reward": None},
        training={"steps": 2},
    )
    learn_inline(config, lambda step, summary: None)
    run = RunDirectory(config.run_path)
    assert run.steps.count() == 2
    assert rerun(run.path, Options())
