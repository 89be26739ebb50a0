"""More than two thousand altered files of a run: every command answers clearly, and no alteration goes unnoticed.

To make one alteration alone, by the name that the test printed:
CLEW_ALTERATION="steps/step-000001.json: deep 1" pytest -m slow tests/diagnose/test_altered_files.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from clew.cli.main import app
from clew.errors import ClewError
from clew.loop.trainer_process import learn_inline
from clew.record.rows import Sequence
from clew.record.run import RunDirectory, Server
from tests.diagnose.altering import FILES, alter, alterations, restore
from tests.diagnose.planted import REWARD, configure
from tests.forked import clew
from tests.models import tiny_model, tiny_tokenizer

COMMAND = typer.main.get_command(app)
"""Command that `app` makes of itself at each call."""

LIMIT_S = 60.0
"""A command that takes longer hangs."""

NOT_COVERED = {
    r"(logs|reports)/": "written for people, read by nobody",
    r"status/": "what each process was doing; it changes every second",
    r"servers\.json": "addresses of processes that have ended",
    r"inbox/": "groups that no step has consumed: nothing was computed from them, and equal runs may differ",
    r"rejected/": "groups that no step has consumed, likewise",
    r"weights(\.json|/)": "what servers load; written again from the checkpoint when a run goes on",
    r"checkpoints/step-000002/model\.safetensors: put another": "the file in weights/ has the same tensors",
    r"steps/index\.jsonl": "repeats what the steps' own files say, and is completed from them",
    r"run\.json: .*": "facts for people; packages, threads and ranks are on record with each step",
    r"config\.yaml: .*": "each step has its own configuration, seed and environment, which are compared",
}
"""Files of which neither a replay nor a diff can know that they were altered, with the reason. They are read all the
same, and what cannot be read is told."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with one file of every kind."""
    folder = tmp_path_factory.mktemp("altered")
    tiny_tokenizer(folder / "model")
    tiny_model(folder / "model")
    (folder / "planted_rewards.py").write_text(REWARD)
    sys.path.insert(0, str(folder))
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i} + 1 ="}) for i in range(4)))
    config = configure(
        folder,
        "training.steps=2",
        "rollout.batch_groups=2",
        "rollout.n_samples=2",
        "sampling.max_new_tokens=6",
        f"eval.path={folder}/prompts.jsonl",
        "eval.every_steps=2",
    )
    learn_inline(config, lambda step, summary: None)
    run = RunDirectory(config.run_path)
    consumed = [row for row in run.steps.read_data(0) if row.group_id == "g000000"]
    run.inbox.put("g000090", [_of_group(row, "g000090") for row in consumed])
    run.inbox.set_running({"g000092": 2})
    run.reject("g000091", [dataclasses.replace(_of_group(row, "g000091"), error="filtered") for row in consumed])
    run.register_server(Server(name="server", address="127.0.0.1:1", pid=1, ready=True))
    wait = {"what": "a batch", "alike": 2, "unblocks": "rollout", "numbers": "2 wanted", "since": 1e9}
    status = {"process": "rollout", "pid": 1, "updated": 1e9, "doing": "rolling out", "version": 2, "waits": [wait]}
    (run.status / "rollout.json").write_text(json.dumps(status))
    return run.path


def _of_group(row: Sequence, group: str) -> Sequence:
    names = {name: getattr(row, name).replace(row.group_id, group) for name in ("id", "episode_id", "group_id")}
    return dataclasses.replace(row, **names)


def commands(original: Path, run: Path, name: str) -> Iterator[tuple[str, ...]]:
    """Read the altered file with everything but a full replay: `clew diff`, and one of the others by turns."""
    file = name.partition(": ")[0]
    yield "diff", str(original), str(run)
    readers: list[tuple[str, ...]] = [("show", str(run))]
    if file.startswith(("inbox", "rejected", "run.json")):
        readers.append(("show", str(run), "g000090" if file.startswith("inbox") else "g000091"))
    if file.startswith(("steps", "run.json")):
        readers.append(("show", str(run), "1"))
        readers.append(("show", str(run), "g000002.e1", "--tokens"))
        readers.append(("replay", str(run), "--stage", "data,rewards,advantages,loss"))
    if file.startswith("status"):
        readers = [("status", str(run))]
    yield random.Random(name).choice(readers)


def outcome(*arguments: str) -> tuple[int, str]:
    """The exit code of a command in this process, and what it printed."""
    printed = io.StringIO()
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return COMMAND.main(list(arguments), standalone_mode=False) or 0, printed.getvalue()
    except ClewError as error:
        return 2, str(error)
    except SystemExit as ended:
        return int(ended.code or 0), printed.getvalue()
    except Exception as error:
        return 70, "".join(traceback.format_exception(error)[-4:])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _hangs(number: int, frame: Any) -> None:
    raise TimeoutError(f"a command takes longer than {LIMIT_S:g} s")


def is_covered(name: str) -> bool:
    """Return whether replay or diff must notice this alteration."""
    return not any(re.match(pattern, name) for pattern in NOT_COVERED)


def how_often(file: str, kind: str) -> int:
    """Number of alterations of one kind that a file gets."""
    if kind in {change.__name__.replace("_", " ") for change in FILES}:
        return 1
    return 1 if file.startswith(("checkpoints", "evals", "reports", "weights/", "inbox", "rejected")) else 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # of other libraries, about what was altered
def test_altered_files(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = original.parent / "altered"
    shutil.copytree(original, run)
    previous = signal.signal(signal.SIGALRM, _hangs)
    wanted = os.environ.get("CLEW_ALTERATION")
    names = [wanted] if wanted else list(alterations(original, how_often))
    assert wanted or len(names) >= 1000, len(names)
    in_shell = {wanted} if wanted else set(random.Random(0).sample(names, 30))
    wrong: list[str] = []
    try:
        for name in names:
            if alter(run, name):
                wrong += [f"{name}\n    {problem}" for problem in problems(original, run, name, name in in_shell)]
            restore(original, run, name)
    finally:
        signal.signal(signal.SIGALRM, previous)
    print(f"{len(names)} alterations, {len(wrong)} problems")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(names)}:", *wrong])


def problems(original: Path, run: Path, name: str, in_shell: bool) -> Iterator[str]:
    """Return what is wrong with how Clew answers an altered file."""
    noticed = False
    for command in commands(original, run, name):
        code, printed = outcome(*command)
        noticed |= command[0] == "diff" and code in (1, 2)
        if code not in (0, 1, 2):
            yield f"clew {command[0]} {' '.join(command[2:])} ends with {code}: {printed}"
        if in_shell and command[0] in ("diff", "status"):
            with clew(*command) as process:
                process.wait(timeout=LIMIT_S)
            if process.returncode != code:
                yield f"clew {command[0]} ends with {process.returncode} in a shell, and with {code} here"
    if (is_covered(name) and not noticed) or random.Random(name).random() < 0.02:
        code, printed = outcome("replay", str(run))
        if code not in (0, 1, 2):
            yield f"clew replay ends with {code}: {printed}"
        if code == 0 and not noticed and is_covered(name):
            yield "neither replay nor diff notices it"
