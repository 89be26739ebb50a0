"""Rollout as a process (`clew rollout`) or inside the trainer's process (launch.mode=inline)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from clew import dotted
from clew.config import Config
from clew.data import load_rows
from clew.gateway.agent_session import Limits
from clew.gateway.gateway_thread import GatewayThread
from clew.inference.protocol import Engine
from clew.models.loading import load_tokenizer
from clew.models.model_folder import config_of
from clew.record.run import RunDirectory
from clew.rollout.long_prompts import leave_out_overlong
from clew.rollout.runner import RolloutRunner
from clew.rollout.server_pool import ServerPool
from clew.waits import Reporter

log = logging.getLogger("clew.rollout")

END_S = 1.5
"""Maximum seconds from a signal to the end of the process, even if a workflow blocks the event loop."""


def rollout(config: Config) -> None:
    """Run episodes until the last step of the run is committed and published, or a signal ends it (SystemExit)."""
    run = RunDirectory(config.run_path)
    with run.hold("rollout"), run.report("rollout") as reporter:
        asyncio.run(_roll_out(config, run, reporter))


def gateway_for(config: Config) -> GatewayThread | None:
    """Return the gateway between the configured agent and the model; None for a workflow, which needs none."""
    if config.rollout.agent is None:
        return None
    return GatewayThread(Limits(turns=config.rollout.max_turns, tokens=config.rollout.max_episode_tokens))


async def _roll_out(config: Config, run: RunDirectory, reporter: Reporter) -> None:
    reporter.set(doing="loading the data and the tokenizer")
    with ended_by_signals():
        async with runner_on_servers(config, run, run, reporter) as runner:
            await runner.run()


@asynccontextmanager
async def runner_on_servers(
    config: Config, run: RunDirectory, served: RunDirectory, reporter: Reporter
) -> AsyncIterator[RolloutRunner]:
    """Yield a runner on the inference servers of the run `served`. Close it and its connections at the end."""
    model = config_of(config.model.path)
    vocab = None if model is None else model.get_text_config().vocab_size
    pool, gateway = ServerPool(served, vocab=vocab), gateway_for(config)
    runner = make_runner(config, run, pool, gateway, reporter)
    try:
        yield runner
    finally:
        await runner.close()
        if gateway is None:
            await pool.close()
        else:
            await gateway.call(pool.close())
            gateway.stop()


def make_runner(
    config: Config,
    run: RunDirectory,
    engine: Engine,
    gateway: GatewayThread | None = None,
    reporter: Reporter | None = None,
) -> RolloutRunner:
    """Load the data and the tokenizer, and return a runner on `engine`."""
    data, tokenizer = config.data, load_tokenizer(config.model.path)
    rows = load_rows(data.path, split=data.split, limit=data.limit, columns=[data.prompt])
    needed = min(config.rollout.batch_groups, len(rows))
    rows = leave_out_overlong(rows, data.path, config, tokenizer, needed=needed)
    eval_rows: list[dict[str, Any]] = []
    if config.eval.path is not None:
        loaded = load_rows(config.eval.path, split=data.split, columns=[data.prompt])
        eval_rows = leave_out_overlong(loaded, config.eval.path, config, tokenizer)
    _warn_of_changed_code(config, run)
    return RolloutRunner(config, run, engine, tokenizer, rows, eval_rows, reporter, gateway)


def _warn_of_changed_code(config: Config, run: RunDirectory) -> None:
    """Warn if the user's code for rollout has changed since the newest step: this process imports it as it is now."""
    count = run.steps.count()
    if config.launch.mode == "inline" or not count:  # inline, the trainer says so
        return
    recorded = run.steps.read(count - 1).get("code", {})
    for name in ("workflow", "agent", "reward"):
        path, then = getattr(config.rollout, name), recorded.get(f"rollout.{name}")
        file = dotted.file_of(path) if path and then else None
        if file is not None and (now := dotted.digest_of(file)) != then:
            log.warning(
                "%s, the file of rollout.%s=%s, has changed since step %d (digest %s, now %s). Rollout was "
                "started again, and from now on it uses the new file.",
                *(file, name, path, count - 1, then, now),
            )


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Cancel the current task on SIGTERM or SIGINT, and raise SystemExit once the block has cleaned up.

    If the process has not ended after `END_S`, a thread ends it; its reward workers die with it.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signals: list[int] = []

    def end(number: int, frame: object) -> None:
        if not signals:
            signals.append(number)
            loop.call_soon_threadsafe(task.cancel)
            last_resort = threading.Timer(END_S, os._exit, [128 + number])
            last_resort.daemon = True
            last_resort.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        yield
    except asyncio.CancelledError:
        if not signals:
            raise
        raise SystemExit(128 + signals[0]) from None
