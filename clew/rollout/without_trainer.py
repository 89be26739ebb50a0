"""Rollout without a trainer: it writes the batches that training would consume to a run directory of their own."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

from clew.config import Config, Eval
from clew.printing import few, print
from clew.record.rows import from_table
from clew.record.run import RunDirectory
from clew.record.writer import Writer
from clew.rollout.process import ended_by_signals, runner_on_servers
from clew.waits import Reporter, waiting

LOOK_S = 0.05
"""Seconds between two looks at the inbox."""

PATIENCE_S = 3.0
"""Seconds until a missing server is reported: one that is just starting needs a few."""


def roll_out(config: Config, steps: int, out: Path) -> None:
    """Make batches until `out` has `steps` of them, on the servers of the run that the configuration names.

    Nothing is trained: the weights stay as they are. rollout.max_lag only limits how many groups are made at once:
    each group's time limit runs from its start, and too many groups at once would exceed theirs. Called again after a
    kill, this function continues where it stopped.
    """
    config = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"max_lag": max(1, config.rollout.max_lag)}),
            "training": config.training.model_copy(update={"steps": steps}),
            "eval": Eval(),
        }
    )
    with (
        Writer(out, config.model_dump(mode="json"), trainer="clew rollout") as writer,
        writer.run.hold("rollout"),
        writer.run.report("rollout") as reporter,
    ):
        asyncio.run(_roll_out(config, steps, writer, reporter))


async def _roll_out(config: Config, steps: int, writer: Writer, reporter: Reporter) -> None:
    inbox, served = writer.run.inbox, RunDirectory(config.run_path)
    served.readmit_attached()
    inbox.remove(writer.run.steps.consumed())  # groups of a batch that was committed just before a kill
    inbox.publish(writer.run.steps.count())
    with ended_by_signals():
        await _until_served(served)
        async with runner_on_servers(config, writer.run, served, reporter) as runner:
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
                    print(f"batch {number}: {few(names, 3)}", flush=True)
            await making


async def _until_served(run: RunDirectory) -> None:
    """Return once a server of the run is ready. Otherwise the first episodes would wait until their time limit."""
    print_at = time.monotonic() + PATIENCE_S
    with waiting("an inference server", unblocks="clew serve"):
        while not any(server.ready for server in run.inference_servers()):
            if time.monotonic() > print_at:
                print_at = math.inf
                print(
                    f"Waiting for an inference server of {run.path}. Start one in another terminal, with the same "
                    f"configuration: `clew serve CONFIG`.",
                    flush=True,
                )
            await asyncio.sleep(LOOK_S)
