"""`clew replay --break`: stop in a debugger inside a step."""

from __future__ import annotations

import sys
from typing import Any

from clew.printing import print
from clew.training.engine import TrainEngine


def stop_at(engine: TrainEngine, steps: range, stage: str) -> None:
    """Make the engine stop in a debugger whenever it comes to `stage` of one of these steps.

    The stage's inputs are in scope. Before the loss and before its backward pass, it stops in each micro-batch.
    """
    known: dict[str, Any] = {}

    def watch(at: str, scope: dict[str, Any]) -> None:
        known.update({name: scope[name] for name in ("batch", "tokens", "plan") if name in scope})
        if at != stage or engine.version not in steps:
            return
        names = {"engine": engine, "model": engine.policy.model, "step": engine.version, **known, **scope}
        where = ""
        if "micro" in scope:
            # rows_N in the scope counts rows from 0 within the micro-batch, so it does not index `batch`
            names["batch_rows_N"] = rows_N = known["tokens"].row_of_S[scope["micro"].where_N]
            minibatches = [[set(rows) for rows in minibatch] for minibatch in known["plan"]]
            update, micro, count = next(
                (number, place, len(minibatch))
                for number, minibatch in enumerate(minibatches)
                for place, rows in enumerate(minibatch)
                if set(rows_N.tolist()) <= rows
            )
            where = f" of micro-batch {micro} of {count} in update {update} (token i is of batch[batch_rows_N[i]])"
        print(
            f"step {engine.version}, before {stage}{where}. In scope: {', '.join(names)}", file=sys.stderr, flush=True
        )
        # Compiled code, so that the debugger's frame has these names; `pass` is the line at which it stops.
        exec(compile("breakpoint()\npass\n", f"<step {engine.version}, before {stage}>", "exec"), names)

    engine.watch = watch
