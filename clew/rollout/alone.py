"""Rollout without a trainer: writes batches as training would consume them to a run directory of their own."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

from clew.config import Config, Eval
from clew.printing import print
from clew.record.rows import from_table
from clew.record.run import RunDirectory
from clew.record.writer import Writer
from clew.rollout.process import end_on_signals, runner_on_servers
from clew.waits import Reporter

LOOK_S = 0.05
"""Seconds between two looks at the inbox."""


def roll_out(config: Config, steps: int, out: Path) -> None:
    """Make batches until `out` has `steps` of them, on the servers of the run that the configuration names.

    Nothing is trained, so there is no lag and no limit to it. Called again after a kill, it goes on where it was.

    Raises:
        ClewError: Rollout cannot go on.
    """
    config = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"max_lag": steps}),
            "training": config.training.model_copy(update={"steps": steps}),
            "eval": Eval(),
        }
    )
    with ExitStack() as stack:
        writer = stack.enter_context(Writer(out, config.model_dump(mode="json"), trainer="clew rollout"))
        stack.enter_context(writer.run.hold("rollout"))
        reporter = stack.enter_context(writer.run.report("rollout"))
        asyncio.run(_roll_out(config, steps, writer, reporter))


async def _roll_out(config: Config, steps: int, writer: Writer, reporter: Reporter) -> None:
    asked_to_end = end_on_signals()
    inbox = writer.run.inbox
    inbox.remove(writer.run.steps.consumed())  # written, but killed before they left
    inbox.publish(writer.run.steps.count())
    try:
        async with runner_on_servers(config, writer.run, RunDirectory(config.run_path), reporter) as runner:
            making = asyncio.ensure_future(runner.run())
            while writer.run.steps.count() < steps:
                await asyncio.wait({making}, timeout=LOOK_S)
                if making.done():
                    making.result()
                finished = inbox.scan()
                names = sorted(finished)[: config.rollout.batch_groups]
                if len(names) == config.rollout.batch_groups:
                    number = writer.step(row for name in names for row in from_table(finished[name]))
                    inbox.publish(number + 1)
                    inbox.remove(names)
                    print(f"batch {number}: {' '.join(names[:3])} … {names[-1]}", flush=True)
            await making
    except asyncio.CancelledError:
        if not asked_to_end:
            raise
        raise SystemExit(128 + asked_to_end[0]) from None
