"""Kills a run right before each of its changes to the run directory, one after the other, and resumes it each time.

    python -m tests.loop.crash_everywhere FOLDER             lists the changes (FOLDER holds config.yaml)
    python -m tests.loop.crash_everywhere FOLDER 5 6 7       kills before each of these, and resumes

No product code takes part in the killing: an audit hook of the interpreter counts each rename, removal and opening
for writing in the run directory, and sends SIGKILL before the n-th. The imports are paid once: each run is a fork.
Prints one JSON line a kill: what the run was about to do, and what was wrong after the resume (an empty list).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

from clew import config as configuration
from clew.config import Config
from clew.loop.trainer_process import learn_inline
from clew.record.run import RunDirectory

WRITES = {"os.rename": 1, "os.remove": 0, "os.rmdir": 0, "open": 0}
"""Audit events, and which argument is the path that changes."""

LEFT_OUT = ("/status/", "/logs/", "/reports/")
"""Folders that only show something; a run does not go by them."""


def watch_changes(folder: Path, told: int, limit: int | None) -> None:
    """Kill this process right before change number `limit` (from 0), and write its name to the descriptor `told`;
    without a limit write the names of all."""
    count = 0
    prefix = str(folder)

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event not in WRITES:
            return
        path = str(arguments[WRITES[event]])
        if not path.startswith(prefix) or any(part in path for part in LEFT_OUT):
            return
        if event == "open" and not (isinstance(arguments[1], str) and set("wax+") & set(arguments[1])):
            return
        if limit is None or count == limit:
            os.write(told, f"{event} {path[len(prefix) + 1 :]}\n".encode())
        if count == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    sys.addaudithook(hook)


def fork_run(config: Config, limit: int | None) -> tuple[int, list[str]]:
    """Train in a fork; returns its wait status and what `watch_changes` wrote."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            watch_changes(config.run_path, write_end, limit)
            learn_inline(config, lambda step, summary: None)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end) as told:
        changes = told.read().splitlines()
    _, status = os.waitpid(child, 0)
    return status, changes


def crash_and_resume(config: Config, limit: int) -> dict:
    """One case."""
    shutil.rmtree(config.run_path, ignore_errors=True)
    _, (about_to,) = fork_run(config, limit)
    run = RunDirectory(config.run_path)
    before = run.steps.index()
    finished = run.inbox.names() | run.steps.consumed() | run.steps.pending_groups()

    wrong: list[str] = []
    status, _ = fork_run(config, None)
    if status != 0:
        wrong.append(f"the resumed run ended with {status}")
    after = run.steps.index()
    groups = [group for entry in after for group in entry["groups"]]
    if len(after) != config.training.steps:
        wrong.append(f"{len(after)} steps")
    if after[: len(before)] != before:
        wrong.append("a recorded step changed")
    if len(set(groups)) != len(groups):
        wrong.append("a group was trained on twice")
    if finished - set(groups):
        wrong.append(f"lost {sorted(finished - set(groups))}")
    if run.inbox.names():
        wrong.append(f"left in the inbox {sorted(run.inbox.names())}")
    for folder in ("steps", "inbox", "checkpoints", "weights", "evals"):
        strays = [path.name for path in (run.path / folder).glob(".*")]
        if strays:
            wrong.append(f"left in {folder}/: {strays}")
    if [entry["version"] for entry in run.evals.read_all()] != [0, 2, 3]:
        wrong.append(f"evaluated {[entry['version'] for entry in run.evals.read_all()]}")
    return {"change": limit, "about_to": about_to, "steps_before": len(before), "wrong": wrong}


if __name__ == "__main__":
    folder, numbers = Path(sys.argv[1]), [int(number) for number in sys.argv[2:]]
    trial = f"from-{numbers[0]}" if numbers else "list"
    warm_up = configuration.load(folder / "config.yaml", [f"trial=warm-up-{trial}"])
    learn_inline(warm_up, lambda step, summary: None)  # imports what a run imports late
    loaded = configuration.load(folder / "config.yaml", [f"trial={trial}"])
    if not numbers:
        print("\n".join(fork_run(loaded, None)[1]))
    for number in numbers:
        print(json.dumps(crash_and_resume(loaded, number)), flush=True)
