"""An agent's episode, run as in rollout but observed step by step. A step is what it does between two awaits.

The tasks that an episode starts belong to it. A plain `run` has a thread of its own and no steps; there, each return
from a call in the user's code counts as one.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import ctypes
import inspect
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from clew.errors import EpisodeError
from clew.rollout.agents import call_run, extra_kwargs_of
from clew.rollout.episode import was_cancelled
from clew.rollout.reward_function import checked
from clew.stress.frames import Code, stack_of_error

HOLD_S = 0.01
"""Minimum seconds of a step that is remembered: while it holds the event loop, no other episode moves."""

OpenEpisode = Callable[[str], AbstractAsyncContextManager[tuple[str, str, Any]]]
"""Function that opens a session of the gateway for an episode ID, as (base_url, api_key, http_client)."""


@dataclass(eq=False)
class Episode:
    """One episode while it runs, and its results afterwards."""

    id: str
    data: dict[str, Any]
    started: float = 0.0
    """Start of the episode, from time.monotonic()."""
    finished: float = 0.0
    code_s: float = 0.0
    """Seconds of its steps, calls that block included; for a plain `run`, processor seconds of its thread."""
    holds: list[tuple[float, float]] = field(default_factory=list)
    """Beginning and end (time.monotonic()) of each of its steps that took `HOLD_S` or more."""
    reward: Any = None
    error: str | None = None
    at: str = ""
    """Line where the error was raised, or where the episode waited when it was stopped."""
    stopped: str = ""
    """Reason why the episode was stopped; empty if it ended by itself."""
    stopped_at: float = 0.0
    abandoned: bool = False
    """True if the next cancellation ends the episode although its code swallows CancelledError."""
    idle_from: float = 0.0
    """Result of `BusyWatch.idle_s` when the episode started."""
    coroutine: Coroutine | None = None
    """Coroutine of an `async def run`, while it runs."""
    thread_id: int | None = None
    """Thread of a plain `run`, while it runs."""

    @property
    def seconds(self) -> float:
        return self.finished - self.started


current_episode: contextvars.ContextVar[Episode | None] = contextvars.ContextVar("clew_episode", default=None)
"""Episode whose code runs now; None outside of episodes."""

Stepped = Callable[[Episode], None]


def name_of(agent: Any) -> str:
    """Return the name of the agent's `run`, for errors."""
    return f"{type(agent).__qualname__}.run"


async def run_episode(
    agent: Any,
    episode: Episode,
    open_episode: OpenEpisode,
    *,
    timeout_s: float | None,
    stepped: Stepped | None,
    code: Code,
) -> None:
    """Run the agent on its own copy of the row, and set the episode's results.

    Whatever the agent raises is kept as the episode's error.

    Args:
        timeout_s: Maximum seconds; None: no limit.
        stepped: Called after each step; None: steps are not reported.
        code: Tells the user's code from that of libraries.
    """
    episode.started = time.monotonic()
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit, open_episode(episode.id) as (base_url, api_key, http_client):
            offered = {"base_url": base_url, "api_key": api_key, "http_client": http_client}
            given = extra_kwargs_of(agent.run, offered)
            if inspect.iscoroutinefunction(agent.run):
                returned: Any = agent.run(copy.deepcopy(episode.data), **given)
            else:
                returned = await _in_thread(agent, episode, given, stepped, code.is_user)
            if inspect.iscoroutine(returned):  # also of a plain `run`: a decorator may hide an async one
                token = current_episode.set(episode)
                try:
                    episode.coroutine = returned
                    returned = await driven(returned, episode, stepped)
                finally:
                    current_episode.reset(token)
        # Whether nothing, or rewards by response ID, may be returned is judged later, when the requests are known.
        nothing = returned is None or (isinstance(returned, dict) and not returned)
        episode.reward = None if nothing else checked(returned, name_of(agent))
    except (Exception, SystemExit, asyncio.CancelledError) as failure:
        # The user's code: whatever it raises is an episode that failed.
        if was_cancelled(failure):
            raise
        of_reward = isinstance(failure, EpisodeError)  # raised by `checked`
        episode.error = str(failure) if of_reward else f"{type(failure).__name__}: {failure}".strip()
        episode.at = str(code.place(stack_of_error(failure)) or code.defined_at)
        if limit.expired():
            episode.error = f"did not end within {timeout_s:g} s"
    finally:
        episode.finished = time.monotonic()
        episode.coroutine = episode.thread_id = None


@types.coroutine
def driven(clew_drives: Coroutine, episode: Episode, stepped: Stepped | None) -> Generator[Any, Any, Any]:
    """Await a coroutine step by step. (`frames` finds the coroutine by the name `clew_drives`.)"""
    thrown: BaseException | None = None
    while True:
        began = time.monotonic()
        try:
            awaited = clew_drives.send(None) if thrown is None else clew_drives.throw(thrown)
        except StopIteration as end:
            return end.value
        finally:
            ended = time.monotonic()
            episode.code_s += ended - began
            if ended - began >= HOLD_S:
                episode.holds.append((began, ended))
            if stepped is not None:
                stepped(episode)
        thrown = None
        try:
            yield awaited
        except GeneratorExit:
            clew_drives.close()
            raise
        except BaseException as error:
            if episode.abandoned:
                try:
                    clew_drives.close()
                except RuntimeError:
                    # It swallows GeneratorExit, too. If collected as garbage, even at Python's exit, it would go on.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(clew_drives))
                raise
            thrown = error


def task_factory(stepped: Stepped | None, made: Callable[[asyncio.Task], None]) -> Callable[..., asyncio.Task]:
    """Return a factory for loop.set_task_factory that assigns the tasks an episode starts to that episode.

    `stepped` is called after each step of such a task. `made` is called with the task while the line that creates it is
    still on the stack.
    """

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task:
        episode = current_episode.get()
        if episode is None or not inspect.iscoroutine(coroutine):
            return asyncio.Task(coroutine, loop=loop, **options)

        async def of_episode(inner: Coroutine) -> Any:
            return await driven(inner, episode, stepped)

        task = asyncio.Task(of_episode(coroutine), loop=loop, **options)
        task.add_done_callback(lambda _: coroutine.close())  # if cancelled before it began, it would warn
        made(task)
        return task

    return make


async def _in_thread(
    agent: Any, episode: Episode, given: dict[str, Any], stepped: Stepped | None, user_code: Callable[[str], bool]
) -> Any:
    def profile(frame: types.FrameType, event: str, argument: Any) -> None:
        if stepped is not None and event in ("return", "c_return") and user_code(frame.f_code.co_filename):
            stepped(episode)

    def run(data: dict[str, Any], **given: Any) -> list[Any]:
        current_episode.set(episode)
        episode.thread_id = threading.get_ident()
        if stepped is not None:
            sys.setprofile(profile)
        try:
            return [agent.run(data, **given)]  # in a list: if it is a coroutine, `call_run` would await it
        finally:
            sys.setprofile(None)
            episode.code_s = time.thread_time()
            episode.thread_id = None

    return (await call_run(types.SimpleNamespace(run=run), copy.deepcopy(episode.data), given))[0]
