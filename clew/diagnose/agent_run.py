"""`clew agent run`: run an agent on a few rows in this process, to try it out before training."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clew.config import provider
from clew.errors import ConfigError
from clew.gateway.agent_session import Limits
from clew.gateway.episode_engine import MAX_NEW_TOKENS, Resources
from clew.gateway.gateway_thread import GatewayThread
from clew.inference.detect_server import find_engine
from clew.inference.protocol import SamplingParams
from clew.models.architecture import context_of
from clew.models.loading import load_tokenizer
from clew.models.vision import load_vision
from clew.printing import counted
from clew.rollout.agents import AgentWorkflow, SharedClient, call_run, extra_kwargs_of, load_agent
from clew.rollout.episode import Episode, run_episode, was_cancelled
from clew.rollout.reward_function import checked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    data: dict[str, Any]
    seconds: float
    episode: Episode | None
    """The captured episode; None with an API provider, which does not return token IDs."""
    returned: str
    """Text to show: the reward of the episode (with an API provider, what the agent returned), or the error."""
    warnings: list[str]
    failed: bool
    """True if the episode failed, such as when the agent raised an error or returned no valid reward."""


def draw_rows(rows: list[dict[str, Any]], n: int, seed: int) -> list[dict[str, Any]]:
    """Return n rows, drawn at random. No row is drawn twice, unless n is larger than the number of rows."""
    draw = random.Random(seed)
    return draw.sample(rows, n) if n <= len(rows) else [draw.choice(rows) for _ in range(n)]


async def run_agent(
    path: str, arguments: dict[str, Any], rows: list[dict[str, Any]], *, base_url: str, api_key: str, seed: int
) -> AsyncIterator[tuple[AgentResult, PreTrainedTokenizerBase | None]]:
    """Run the agent on each row, one after the other, and yield each result with the model's tokenizer.

    An async `run` is awaited on this event loop, so breakpoints in it work; a plain `run` is called in a thread. With
    an API provider, the tokenizer is None and the seed has no effect.

    Args:
        path: Dotted path of the agent's class.
        arguments: Arguments of the class's constructor.
        rows: Rows of data, each passed to the agent's `run`.
        base_url: URL of a served model or of an API provider.
        api_key: Key that the server or the provider expects.
        seed: Seed for sampling tokens.

    Raises:
        ConfigError: The agent cannot be loaded; see `load_agent`.
        EngineError: Nothing answers at base_url, or a gateway does.
        ModelError: The tokenizer of the served model cannot be loaded.
    """
    agent = load_agent(path, arguments)
    served = await find_engine(base_url, api_key)
    if served is None:
        client = SharedClient()
        try:
            for row in rows:
                yield await _with_provider(agent, row, base_url, api_key, client), None
        finally:
            await client.really_close()
        return
    tokenizer = load_tokenizer(served.model)
    shared = Resources(
        engine=served.engine,
        tokenizer=tokenizer,
        sampling=SamplingParams(max_new_tokens=MAX_NEW_TOKENS),
        seed=seed,
        prompt_column="prompt",
        reward=None,
        context=context_of(served.model),
        vision=load_vision(served.model) if served.engine.takes_images else None,
    )
    gateway = GatewayThread(Limits(), served.engine.close)
    workflow = AgentWorkflow(agent, gateway)
    try:
        for number, row in enumerate(rows):
            yield await _with_capture(workflow, shared, f"g{number:06d}", row), tokenizer
    finally:
        await workflow.close()
        gateway.stop()


async def _with_capture(workflow: AgentWorkflow, shared: Resources, group_id: str, row: dict[str, Any]) -> AgentResult:
    began, before = time.monotonic(), asyncio.all_tasks()
    episode = await run_episode(
        workflow,
        shared,
        episode_id=f"{group_id}.e0",
        group_id=group_id,
        data=row,
        admitted_version=0,
        admitted_at=time.time(),
        timeout_s=None,
    )
    await asyncio.sleep(0)  # tasks that end within one more turn of the event loop are not reported
    warnings = [*episode.warnings]
    left = [task for task in asyncio.all_tasks() - before if not task.done()]
    if left:
        names = ", ".join(sorted({getattr(task.get_coro(), "__qualname__", "?") for task in left}))
        warnings.append(f"{counted(len(left), 'asyncio task')} still running after the episode: {names}")
    returned = episode.error.splitlines()[0] if episode.error else f"{episode.reward:g}"
    return AgentResult(
        data=row,
        seconds=time.monotonic() - began,
        episode=episode,
        returned=returned,
        warnings=warnings,
        failed=episode.error is not None,
    )


async def _with_provider(
    agent: Any, row: dict[str, Any], base_url: str, api_key: str, client: SharedClient
) -> AgentResult:
    began, failed = time.monotonic(), False
    arguments = extra_kwargs_of(agent.run, {"base_url": base_url, "api_key": api_key, "http_client": client})
    try:
        value = await call_run(agent, deepcopy(row), arguments)
        returned = str(checked(value, "the agent's run"))
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # the user's code
        if was_cancelled(error):
            raise
        returned, failed = f"{type(error).__name__}: {error}", True
    seconds = time.monotonic() - began
    return AgentResult(data=row, seconds=seconds, episode=None, returned=returned, warnings=[], failed=failed)


def base_url_of(named: str | None) -> str:
    """Return the base URL of the model: `named`, or else the environment variable OPENAI_BASE_URL.

    Raises:
        ConfigError: Neither of them is set.
    """
    base_url = named or provider()[0]
    if not base_url:
        raise ConfigError(
            "Cannot run the agent: no server is named. Start `clew serve CONFIG`, and set OPENAI_BASE_URL to the "
            "URL that it prints, or add --base-url URL."
        )
    return base_url
