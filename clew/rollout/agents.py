"""Agents: any class with `async def run(self, data, **extra_kwargs)` that talks to a model provider.

extra_kwargs has base_url and api_key, for any client of OpenAI's or Anthropic's API, and http_client, an
httpx2.AsyncClient for the official clients (AsyncOpenAI(http_client=...)). An agent that names only some of them gets
only those.

`run` returns a number, or a dict from interaction ID (a response's `id`) to number. A plain `def run` is run in a
thread. One instance serves all episodes, side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self

import httpx2

from clew import dotted
from clew.config import Config
from clew.errors import ConfigError
from clew.gateway.episode_engine import EpisodeEngine, WarningLog
from clew.gateway.gateway_thread import GatewayThread
from clew.rollout.reward_function import Reward, reward_of_agent

log = logging.getLogger("clew.rollout")

EXTRA_KWARGS = ("base_url", "api_key", "http_client")

CANCEL_S = 10.0
"""Seconds that a cancelled agent may take to end."""


class SharedClient(httpx2.AsyncClient):
    """One HTTP client and connection pool for all episodes; an agent that closes it closes no connection."""

    def __init__(self) -> None:
        super().__init__(timeout=None, limits=httpx2.Limits(max_connections=None, max_keepalive_connections=1024))

    async def aclose(self) -> None:
        """Do nothing: an agent must not close the shared connections. See `really_close`."""

    async def __aenter__(self) -> Self:
        return self  # the original raises an error if the client is in use already, as it is by other episodes

    async def __aexit__(self, *exception: object) -> None:
        pass

    async def really_close(self) -> None:
        await super().aclose()


def load_agent(path: str, arguments: dict[str, Any]) -> Any:
    """Import the agent's class and return an instance of it.

    Raises:
        ConfigError: It is not a class with a `run` method, `run` cannot be called, or the class does not take
            `arguments` or raises an error.
    """
    cls = dotted.load(path, "rollout.agent")
    run = getattr(cls, "run", None)
    if not isinstance(cls, type) or not callable(run):
        raise ConfigError(
            f"rollout.agent={path} is no agent; expected a class with `async def run(self, data, **extra_kwargs)`."
        )
    try:
        inspect.signature(run).bind(None, {}, **extra_kwargs_of(run, dict.fromkeys(EXTRA_KWARGS)))
    except TypeError as error:
        raise ConfigError(
            f"rollout.agent={path}: run cannot be called as run(data, base_url=, api_key=, http_client=): {error}."
        ) from None
    return dotted.create(cls, arguments, path, "rollout.agent")


def extra_kwargs_of(run: Any, offered: dict[str, Any]) -> dict[str, Any]:
    """Return the offered keyword arguments that `run` accepts."""
    parameters = inspect.signature(run).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return offered
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in offered.items() if name in names}


async def call_run(agent: Any, data: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Call `agent.run`, in a thread if it is a plain function, and return its result."""
    if inspect.iscoroutinefunction(agent.run):
        return await agent.run(data, **arguments)
    returned = await _in_thread(functools.partial(agent.run, data, **arguments))
    return await returned if inspect.isawaitable(returned) else returned  # a decorator may hide an async function


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Run `call` in a daemon thread. Unlike a thread of a pool, it does not keep the process alive if it never ends."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    # An error is passed as a value, because a future takes no StopIteration as its exception.
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(outcome: tuple[Any, BaseException | None]) -> None:
        if not done.done():
            done.set_result(outcome)

    def work() -> None:
        try:
            outcome = context.run(call), None
        except BaseException as error:
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name="agent", daemon=True).start()
    returned, error = await done
    if error is not None:
        raise error
    return returned


class AgentWorkflow:
    """An agent used as a workflow: it reaches the model through the gateway."""

    def __init__(self, agent: Any, gateway: GatewayThread) -> None:
        self.agent = agent
        self.gateway = gateway
        self.name_in_errors = f"{type(agent).__module__}.{type(agent).__qualname__}.run"
        self._warnings = WarningLog(log)
        self._client = SharedClient()

    async def run_episode(self, engine: EpisodeEngine, data: dict[str, Any]) -> Reward:
        key, _ = self.gateway.open(engine)
        offered = {"base_url": self.gateway.base_url, "api_key": key, "http_client": self._client}
        arguments = extra_kwargs_of(self.agent.run, offered)
        try:
            returned = await self._await_agent(call_run(self.agent, data, arguments))
        finally:
            await asyncio.shield(self.gateway.close(key))
            for warning, kind in engine.warnings.items():
                self._warnings.add(engine.episode_id, warning, kind)
        ids = {interaction.id for interaction in engine.interactions}
        return reward_of_agent(returned, self.name_in_errors, ids=ids, own=engine.turn_rewards)

    async def _await_agent(self, run: Coroutine[Any, Any, Any]) -> Any:
        """Await the agent and return its result.

        If this is cancelled and the agent is still running after `CANCEL_S`, its coroutine is closed;
        otherwise the process could never end.
        """

        async def outcome() -> tuple[Any, BaseException | None]:
            try:
                return await run, None
            except (Exception, SystemExit) as error:  # if it left the task, SystemExit would end the event loop
                return None, error

        task = asyncio.ensure_future(outcome())
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_S)
            if not task.done():
                log.warning(
                    "%s was still running %g s after it was cancelled, and was stopped. Do not swallow CancelledError.",
                    self.name_in_errors,
                    CANCEL_S,
                )
                with contextlib.suppress(RuntimeError):  # raised if the agent ignores GeneratorExit, too
                    run.close()
                task.cancel()
            raise
        returned, error = task.result()
        if error is not None:
            raise error
        return returned

    async def close(self) -> None:
        await self._client.really_close()


def agent_workflow(config: Config, gateway: GatewayThread) -> AgentWorkflow:
    """Return the agent that the configuration names, as a workflow. Raises ConfigError as `load_agent` does."""
    assert config.rollout.agent is not None
    return AgentWorkflow(load_agent(config.rollout.agent, config.rollout.workflow_kwargs), gateway)
