"""The agent's current code against recorded responses: no model, the same every time, the first difference named."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clew import config as configuration
from clew.cli.main import app
from clew.diagnose import agent_run
from clew.diagnose.agent_replay import Replay, replay_agent
from clew.diagnose.causes import with_sections_at
from clew.diagnose.recorded_model import RecordedModel, first_difference
from clew.gateway.episode_engine import resources
from clew.record.run import RunDirectory
from clew.rollout.agents import SharedClient
from clew.stress.standin import StandIn, byte_tokenizer
from clew.view.find_episode import Name, episode_of, find_group
from tests.gateway.chatml import chatml_tokenizer
from tests.rollout.scripted import config_for
from tests.rollout.test_agents import rolled_out
from tests.rollout.user_agents import Once


def recorded(tmp_path: Path, agent: str, **rollout: Any) -> RunDirectory:
    _, run = asyncio.run(rolled_out(tmp_path, agent, **rollout))
    chatml_tokenizer(tmp_path / "model")
    configure(run, tmp_path, agent, **rollout)
    return run


def configure(run: RunDirectory, tmp_path: Path, agent: str, **rollout: Any) -> None:
    section = {"agent": f"tests.rollout.user_agents.{agent}", "reward": None, **rollout}
    run.config_path.write_text(configuration.dump(config_for(tmp_path, rollout=section)))


def replayed(run: RunDirectory, episode: str, agent: str | None = None, *, older: bool = False) -> Replay:
    """older: as if recorded before tools were."""
    path = None if agent is None else f"tests.rollout.user_agents.{agent}"
    name = Name.parse(episode)
    rows = episode_of(run, find_group(run, name), name)
    for interaction in (each for row in rows for each in row.interactions if older):
        del interaction["tools"]
    return replay_agent(run, rows, agent=path, base_url=None)


def test_unchanged_code_does_and_gets_what_it_did_and_got(tmp_path: Path) -> None:
    run = recorded(tmp_path, "Turns")
    first, again = replayed(run, "g000000.e1"), replayed(run, "g000000.e1")
    assert first.same and again.same and first.rewards == again.rewards and first.error == again.error
    assert (first.model.answered, first.model.recorded, first.rewards) == (3, 3, [1.0])


def test_rewards_of_turns_are_compared_sequence_by_sequence(tmp_path: Path) -> None:
    run = recorded(tmp_path, "RewardsItsFirstTurn", sequences="individual")
    again = replayed(run, "g000000.e0")
    assert again.same and again.rewards == again.recorded_rewards == [1.5, 1.0, 1.0]
    other = replayed(run, "g000000.e0", "Turns")
    assert not other.same and other.rewards == [1.0, 1.0, 1.0]


def test_the_first_request_that_differs_is_shown(tmp_path: Path) -> None:
    run = recorded(tmp_path, "Turns")
    changed = replayed(run, "g000000.e0", "Rude")
    assert not changed.same and changed.model.answered == 1
    where = "message 2 (user), content, character 0"
    assert changed.model.difference[0] == f"request 1 differs from the recorded g000000.e0.i1 in {where}:"
    assert changed.model.difference[2] == "+now:      No!" and where in (changed.error or "")
    assert "now asks something else" in (changed.error or "")


@pytest.mark.parametrize(
    ("arguments", "where", "then", "now"),
    [
        ({"temperature": 0.5}, "sampling, temperature", "1.0", "0.5"),
        ({"top_p": 0.9}, "sampling, top_p", "1.0", "0.9"),
        ({"max_tokens": 5}, "sampling, max_new_tokens", "6", "5"),
        ({"stop": ["\n"]}, "sampling, stop 0", "absent", '"\\n"'),
        ({"seed": 7}, "sampling, seed", "absent", "7"),
        ({"model": "other"}, "model, character 0", "policy", "other"),
        ({"about": "adds two  numbers"}, "tool 0, function, description, character 9", "adds·two·n", "adds·two··n"),
        ({"said": "and now?\n"}, "message 2 (user), content, character 8", "and·now?", "and·now?⏎"),
        ({"said": "and now? "}, "message 2 (user), content, character 8", "and·now?", "and·now?·"),
    ],
)
@pytest.mark.parametrize("older", [False, True])
def test_all_that_decides_what_the_model_reads_and_how_it_samples_is_compared(
    tmp_path: Path, arguments: dict[str, Any], where: str, then: str, now: str, older: bool
) -> None:
    run = recorded(tmp_path, "Asking")
    if older:
        where = where.replace("tool 0, function, description, character 9", "what the chat template makes of messages")
    assert replayed(run, "g000000.e0", older=older).same
    configure(run, tmp_path, "Asking", workflow_kwargs=arguments)
    changed = replayed(run, "g000000.e0", older=older)
    assert not changed.same and changed.model.answered == 1
    head, before, after = changed.model.difference
    assert head.startswith(f"request 1 differs from the recorded g000000.e0.i1 in {where}")
    assert then in before and now in after and before != after


def test_another_chat_template_is_a_difference(tmp_path: Path) -> None:
    run = recorded(tmp_path, "Once")
    assert replayed(run, "g000000.e0").same
    tokenizer = chatml_tokenizer(tmp_path / "model")
    tokenizer.chat_template = str(tokenizer.chat_template).replace("<|im_start|>user", "<|im_start|>user:")
    tokenizer.save_pretrained(tmp_path / "model")
    changed = replayed(run, "g000000.e0")
    head, before, after = changed.model.difference
    assert not changed.same and "in what the chat template makes of messages and tools, character " in head
    assert "<|im_start|>user⏎" in before and "<|im_start|>user:⏎" in after
    done = CliRunner().invoke(app, ["agent", "replay", str(run.path), "--episode", "g000000.e0"])
    assert done.exit_code == 1 and "+now:" in done.output


def test_code_that_asks_for_less_or_more(tmp_path: Path) -> None:
    run = recorded(tmp_path, "Turns")
    less = replayed(run, "g000000.e0", "Once")
    assert (less.model.answered, less.same, less.model.difference) == (1, False, [])
    once = recorded(tmp_path / "once", "Once")
    more = replayed(once, "g000000.e0", "Turns")
    assert more.model.difference[0] == "request 1 is new: every recorded request (1) is already answered:"


def test_an_episode_that_failed_has_its_tokens_on_record_and_can_be_debugged(tmp_path: Path) -> None:
    run = recorded(tmp_path, "Once", workflow_kwargs={"give": "raise"})
    again = replayed(run, "g000000.e0")
    assert again.same and again.model.answered == 1 and "RuntimeError: planted" in (again.error or "")


def test_an_episode_that_ended_with_an_exit_can_be_replayed(tmp_path: Path) -> None:
    run = recorded(tmp_path, "Once", workflow_kwargs={"give": "raise"})
    name = Name.parse("g000000.e0")
    rows = episode_of(run, find_group(run, name), name)
    again = replay_agent(run, rows, agent=f"{__name__}.Exits", base_url=None)
    assert again.same and again.error == "SystemExit: 3"


class Exits(Once):
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        try:
            return await super().run(data, **extra_kwargs)
        except RuntimeError:
            sys.exit(3)


def test_an_agent_that_raises_the_error_of_a_cancelled_task_has_failed(tmp_path: Path) -> None:
    """No traceback: nobody has cancelled the replay."""
    run = recorded(tmp_path, "Once")
    name = Name.parse("g000000.e0")
    rows = episode_of(run, find_group(run, name), name)
    again = replay_agent(run, rows, agent=f"{__name__}.Cancelled", base_url=None)
    assert not again.same and again.model.answered == 1 and (again.error or "").startswith("CancelledError")


def test_an_agent_before_a_provider_that_raises_the_error_of_a_cancelled_task_has_failed() -> None:
    client = SharedClient()
    result = asyncio.run(agent_run._with_provider(CancelledAtOnce(), {"prompt": "a"}, "http://127.0.0.1:9", "", client))
    assert result.failed and result.returned.startswith("CancelledError")


class Cancelled(Once):
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        await super().run(data, **extra_kwargs)
        raise asyncio.CancelledError


class CancelledAtOnce:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        raise asyncio.CancelledError


def test_values_and_their_types_are_compared_within_containers_too() -> None:
    found = first_difference({"strict": [True]}, {"strict": [1]}, "tool")
    assert found is not None and (found.where, found.then, found.now) == ("tool, strict 0", "true", "1")
    assert first_difference({"strict": [True]}, {"strict": [True]}, "tool") is None


def test_the_first_request_that_a_live_model_answers_is_streamed_too(tmp_path: Path) -> None:
    tokenizer, tokens = byte_tokenizer(), list[int]()
    shared = resources(config_for(tmp_path), StandIn(tokenizer, latency_s=0.0), tokenizer, None, vision=None)
    model = RecordedModel(shared, [], "g000000.e0", live=True)
    answer = asyncio.run(model.generate([7], on_token=lambda token, logprob: tokens.append(token)))
    assert model.live_answers == 1 and tokens == answer.output_ids != []


@pytest.mark.parametrize("episode", ["g000099.e0", "g000000.e9"])
def test_an_episode_that_is_not_there(tmp_path: Path, episode: str) -> None:
    run = recorded(tmp_path, "Once")
    with pytest.raises(Exception, match="has no"):
        replayed(run, episode)


def test_an_episode_is_judged_by_the_configuration_that_it_was_made_with(tmp_path: Path) -> None:
    run = recorded(tmp_path, "Turns")
    config = configuration.load(run.config_path, ["sampling.max_new_tokens=3", "seed=7"])
    run.describe(config, step=1)
    run.config_path.write_text(configuration.dump(config))
    assert replayed(run, "g000000.e1").same


def test_options_of_any_form_are_put_back_as_they_were(tmp_path: Path) -> None:
    run, then = recorded(tmp_path, "Turns"), {"prices": {"gpt-4.1": 0.4}, "tools": {}, "was": 2, "gone": 1}
    configure(run, tmp_path, "Turns", workflow_kwargs=then)
    before = configuration.load(run.config_path)
    now = {"prices": {"gpt-4.1": 0.5}, "tools": {"add": 1}, "was": {"b": 3}, "new": 4}
    run.describe(
        before.model_copy(update={"rollout": before.rollout.model_copy(update={"workflow_kwargs": now})}), step=1
    )
    config = configuration.load(run.config_path)
    assert config.rollout.workflow_kwargs == now
    assert with_sections_at(run, config, 0, "rollout") == before
    assert with_sections_at(run, config, 1, "rollout") == config


def test_the_reason_why_a_group_was_rejected_is_no_error_of_its_episodes(tmp_path: Path) -> None:
    run = recorded(tmp_path, "Turns", drop_equal_rewards=True)
    again = replayed(run, "g000000.e1")
    assert again.same and again.recorded_error is None and again.rewards == again.recorded_rewards
