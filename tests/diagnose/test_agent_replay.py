"""The agent's present code against recorded responses: no model, the same every time, the first difference named."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from clew import config as configuration
from clew.diagnose.agent_replay import Replay, replay_agent
from clew.record.run import RunDirectory
from clew.view.find import Name, find_episode
from tests.gateway.chatml import chatml_tokenizer
from tests.rollout.scripted import config_for
from tests.rollout.test_agents import rolled_out


def recorded(tmp_path: Path, agent: str, **rollout: Any) -> RunDirectory:
    _, run = asyncio.run(rolled_out(tmp_path, agent, **rollout))
    chatml_tokenizer(tmp_path / "model")
    section = {"agent": f"tests.rollout.user_agents.{agent}", "reward": None, **rollout}
    run.config_path.write_text(configuration.dump(config_for(tmp_path, rollout=section)))
    return run


def replayed(run: RunDirectory, episode: str, agent: str | None = None) -> Replay:
    path = None if agent is None else f"tests.rollout.user_agents.{agent}"
    return replay_agent(run, find_episode(run, Name.parse(episode)), agent=path, base_url=None)


def test_unchanged_code_does_and_gets_what_it_did_and_got(tmp_path: Path) -> None:
    run = recorded(tmp_path, "Turns")
    first, again = replayed(run, "g000000.e1"), replayed(run, "g000000.e1")
    assert first.same and first == again
    assert (first.answered, first.recorded, first.reward) == (3, 3, 1.0)


def test_the_first_request_that_differs_is_shown(tmp_path: Path) -> None:
    run = recorded(tmp_path, "Turns")
    changed = replayed(run, "g000000.e0", "Rude")
    assert not changed.same and changed.answered == 1
    assert changed.difference[0] == "request 1 differs from the recorded g000000.e0.i1:"
    assert "+user: content: No!" in changed.difference
    assert "asks something else than then" in (changed.error or "")


def test_code_that_asks_for_less_or_more(tmp_path: Path) -> None:
    run = recorded(tmp_path, "Turns")
    less = replayed(run, "g000000.e0", "Once")
    assert (less.answered, less.same, less.difference) == (1, False, [])
    once = recorded(tmp_path / "once", "Once")
    more = replayed(once, "g000000.e0", "Turns")
    assert more.difference[0] == "request 1 is one more than the 1 that are recorded:"


def test_an_episode_that_failed_has_its_tokens_on_record_and_can_be_debugged(tmp_path: Path) -> None:
    run = recorded(tmp_path, "Once", workflow_kwargs={"give": "raise"})
    again = replayed(run, "g000000.e0")
    assert again.same and again.answered == 1 and "RuntimeError: planted" in (again.error or "")


@pytest.mark.parametrize("episode", ["g000099.e0", "g000000.e9"])
def test_an_episode_that_is_not_there(tmp_path: Path, episode: str) -> None:
    run = recorded(tmp_path, "Once")
    with pytest.raises(Exception, match="has no"):
        replayed(run, episode)
