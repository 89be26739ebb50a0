"""Worker processes for plain reward functions. Each does one job at a time, and is replaced if a job takes too long.

A reward function may hang, even inside C code that no signal handler interrupts, or take its process down. Neither may
stop rollout, and neither may count as a reward of 0: the episode fails with an EpisodeError.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from clew import dotted
from clew.errors import ConfigError, EpisodeError
from clew.rollout.reward_function import Reward
from clew.waits import waiting

log = logging.getLogger("clew.rollout")


class RewardPool:
    """Calls the reward `path` in `workers` processes, each call for at most `timeout_s` seconds.

    The time in which a worker starts and imports the function does not count.

    Use it from one event loop, in a thread that ends after `close`: on Linux a worker is killed when the *thread* that
    started it ends.
    """

    def __init__(self, path: str, prompt_column: str, *, workers: int, timeout_s: float) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self._prompt_column = prompt_column
        self._file = dotted.file_of(path)
        self._digest = dotted.digest_of(self._file) if self._file else ""
        """Digest of the function's file, as the newest workers have imported it."""
        self._workers = [_Worker(path, prompt_column) for _ in range(workers)]
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        """Workers without a job; the last one used comes first, because it has imported the function."""
        for worker in self._workers:
            self._free.put_nowait(worker)
        self._closed = False

    async def __call__(self, completion: str, data: dict[str, Any]) -> Reward:
        """Return the reward of a completion.

        Raises:
            EpisodeError: The function raised, returned no number, took too long, or its process died.
            ConfigError: A worker could not import the function.
        """
        busy = f"all {len(self._workers)} are busy"
        with waiting("a free reward worker", unblocks="the reward function", numbers=lambda: busy):
            worker = await self._free.get()
        answered = False
        try:
            if not worker.ready:
                await worker.start()
            with waiting(f"reward {self.path}", unblocks="the reward function", numbers=lambda: f"pid {worker.pid}"):
                async with asyncio.timeout(self.timeout_s):
                    kind, answer = await worker.call((completion, data))
            answered = True
        except TimeoutError:
            raise EpisodeError(
                f"reward {self.path} timed out after {self.timeout_s:g} s (rollout.reward_timeout_s); "
                f"its worker was killed and replaced."
            ) from None
        except EOFError:
            raise EpisodeError(
                f"the process that computed reward {self.path} died ({worker.how_it_ended()}); it was replaced."
            ) from None
        finally:  # also when the episode is cancelled: a busy worker is of no use to the next one
            self._free.put_nowait(worker if answered else self._replace(worker))
        if kind == "failed":
            raise EpisodeError(str(answer))
        return answer

    def close(self) -> None:
        """Kill all workers, whatever they are doing."""
        self._closed = True
        for worker in self._workers:
            worker.kill()

    def _replace(self, worker: _Worker) -> _Worker:
        worker.kill()
        if self._closed:
            return worker
        self._warn_of_another_file()
        fresh = _Worker(self.path, self._prompt_column)
        self._workers[self._workers.index(worker)] = fresh
        return fresh

    def _warn_of_another_file(self) -> None:
        """Warn if the function's file has changed since the workers imported it. A new worker imports it as it is."""
        if self._file is None or (now := dotted.digest_of(self._file)) == self._digest:
            return
        log.warning(
            "%s, the file of rollout.reward=%s, has changed (digest %s, now %s). A reward worker was replaced, and "
            "from now on it uses the new file. Older workers still use the old one, whose digest the steps record.",
            *(self._file, self.path, self._digest, now),
        )
        self._digest = now


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, path: str, prompt_column: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = f"from clew.rollout.reward_worker import main; main({os.getpid()}, {theirs.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", command],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the parent's to handle, and what the function started is killed too
            )
        self.path = path
        self.pid = self._process.pid
        self.ready = False
        self._pipe = Connection(ours.detach())
        self._pipe.send((sys.path, dotted.trust_rules, path, prompt_column))

    async def start(self) -> None:
        """Wait until the worker has imported the function. Raises ConfigError if it could not."""
        try:
            with waiting(
                "a reward worker to start",
                unblocks="the import of the reward's module",
                numbers=lambda: f"{self.path} in pid {self.pid}",
            ):
                kind, message = await self._receive()
        except EOFError:
            raise ConfigError(
                f"Cannot import rollout.reward={self.path}: the worker process ended at once ({self.how_it_ended()})."
            ) from None
        if kind == "failed":
            raise ConfigError(message)
        self.ready = True

    async def call(self, job: tuple[str, dict[str, Any]]) -> tuple[str, Any]:
        try:
            self._pipe.send(job)
        except OSError:
            raise EOFError from None
        return await self._receive()

    async def _receive(self) -> tuple[str, Any]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._pipe.fileno(), lambda: arrived.done() or arrived.set_result(None))
        try:
            await arrived
        finally:
            loop.remove_reader(self._pipe.fileno())
        try:
            return self._pipe.recv()
        except OSError:
            raise EOFError from None

    def kill(self) -> None:
        """Kill the process and the function's own child processes with SIGKILL, and wait until the process is gone."""
        if self._pipe.closed:  # it was killed before, and its process ID may be another's by now
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)  # also if it died by itself: its child processes may not have
        except ProcessLookupError:
            self._process.kill()
        self._process.wait()
        self._pipe.close()

    def how_it_ended(self) -> str:
        """Return the exit code or signal of a process that has closed its pipe, and kill whatever is left of it."""
        # This blocks the event loop, but rarely for long: a process whose pipe is closed is ending, or has ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)
        self.kill()
        code = self._process.returncode
        return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
