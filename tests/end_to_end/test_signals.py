"""Ctrl-C, SIGKILL, and processes started one by one: everything ends in time, nothing is lost, each wait has a name."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from tests.end_to_end.project import PATIENCE_S, USER_CODE, Project

GATED = """
def gated(completion, data):
    while not Path("go").exists():
        Path("entered").touch()
        time.sleep(0.01)
    return digits(completion, data)

def slow(completion, data):
    time.sleep(0.03)
    return digits(completion, data)
"""

STOPS = """
from clew.rollout.workflows import SingleTurn

calls = []

def stops(completion, data):
    calls.append(data)
    if len(calls) == 2:
        breakpoint()
    return digits(completion, data)

class Stops(SingleTurn):
    async def run_episode(self, engine, data):
        if engine.episode_id == "g000003.e1":
            breakpoint()
        return await super().run_episode(engine, data)
"""


def interrupt(project: Project, process: subprocess.Popen[Any]) -> str:
    """Ctrl-C: SIGINT to the group of the process, as a terminal does. It ends within 10 s and leaves no process."""
    os.killpg(process.pid, signal.SIGINT)
    ended = project.end(process, seconds=10.0)
    assert ended.code == 130 and "Traceback" not in ended.output, ended.output
    assert "nothing recorded is lost" in ended.error and "same command" in ended.error
    return ended.error


def waits_for(project: Project, role: str, what: str) -> bool:
    return any(what in wait["what"] for wait in project.status(role)["waits"])


def child(process: subprocess.Popen[Any], command: str) -> psutil.Process:
    """The process among those that `clew train` started which runs `clew COMMAND`."""
    (found,) = [each for each in psutil.Process(process.pid).children() if each.cmdline()[4:5] == [command]]
    return found


@pytest.mark.slow
def test_ctrl_c_at_any_moment_and_the_same_command_goes_on(project: Project) -> None:
    project.code(USER_CODE + GATED)
    project.set(rollout={"reward": "mine.gated"}, training={"steps": 40}, checkpoint={"every_steps": 100})

    starting = project.start("train")
    project.until(lambda: (project.path / "logs" / "trainer.log").exists(), starting)
    assert "at step 0 of 40" in interrupt(project, starting)

    waiting = project.start("train")
    project.until(lambda: waits_for(project, "rollout", "reward mine.gated"), waiting)
    project.until(lambda: waits_for(project, "trainer", "a batch for step 0"), waiting)
    shown = subprocess.run([sys.executable, "-m", "clew", "status", "runs/tiny/0"], cwd=project.folder, text=True,
                           capture_output=True, check=True).stdout  # fmt: skip
    for words in ("trainer", "rollout", "server", "a batch for step 0", "2 groups wanted, 0 ready", "reward mine.gated",
                  "running groups", "admission closed", " s "):  # fmt: skip
        assert words in shown, f"{words!r} is not in:\n{shown}"
    assert "at step 0 of 40" in interrupt(project, waiting)

    (project.folder / "go").touch()
    training = project.start("train")
    project.until(lambda: project.run.steps.count() >= 5, training)
    interrupt(project, training)
    before = project.digests()
    assert 5 <= len(before) < 40
    assert (project.path / "checkpoints" / f"step-{len(before):06d}").exists()  # so nothing is trained again

    ended = project.inline(f"training.steps={len(before) + 2}")
    assert ended.code == 0, ended.output
    assert project.digests()[: len(before)] == before and "from the record" not in ended.output


@pytest.mark.slow
def test_ctrl_c_inline(project: Project) -> None:
    """Between two groups; and in a reward that does not return, since there are no time limits."""
    project.code(USER_CODE + GATED)
    project.set(rollout={"reward": "mine.gated"}, training={"steps": 200}, launch={"mode": "inline"},
                sampling={"max_new_tokens": 8, "min_new_tokens": 8})  # all end at once  # fmt: skip
    (project.folder / "go").touch()
    process = project.start("train")
    project.until(lambda: project.run.steps.count() >= 2, process)
    interrupt(project, process)
    (project.folder / "go").unlink()
    stuck = project.start("train")
    project.until(lambda: (project.folder / "entered").exists(), stuck)
    interrupt(project, stuck)
    (project.folder / "go").touch()
    before = project.digests()
    ended = project.inline(f"training.steps={len(before) + 1}")
    assert ended.code == 0 and project.digests()[: len(before)] == before, ended.output


@pytest.mark.slow
def test_a_server_and_a_rollout_process_that_are_killed_are_started_again(project: Project) -> None:
    project.code(USER_CODE + GATED)
    project.set(rollout={"reward": "mine.slow"}, training={"steps": 12})
    train = project.start("train")
    for steps, command in ((2, "serve"), (5, "rollout")):
        project.until(lambda steps=steps: project.run.steps.count() >= steps, train)
        child(train, command).kill()
    ended = project.end(train)
    assert ended.code == 0, ended.output
    groups = [group for entry in project.run.steps.index() for group in entry["groups"]]
    assert len(groups) == len(set(groups)) == 24


@pytest.mark.slow
def test_a_server_that_is_killed_too_often_ends_the_run(project: Project) -> None:
    project.code(USER_CODE + GATED)
    project.set(rollout={"reward": "mine.gated"}, launch={"restarts": 0})
    train = project.start("train")
    project.until(lambda: waits_for(project, "rollout", "reward"), train)
    child(train, "serve").kill()
    ended = project.end(train)
    assert ended.code == 2 and "the server was killed by signal 9" in ended.error and "at step 0 of 3" in ended.error


@pytest.mark.slow
def test_processes_started_alone_find_one_another_and_survive_each_other(project: Project) -> None:
    project.code(USER_CODE + GATED)
    project.set(rollout={"reward": "mine.slow"}, training={"steps": 15})

    rollout = project.start("rollout")
    project.until(lambda: waits_for(project, "rollout", "the first weights"), rollout)
    learn = project.start("learn")
    project.until(lambda: waits_for(project, "rollout", "an inference server"), rollout, learn)
    project.until(lambda: waits_for(project, "trainer", "a batch for step 0"), rollout, learn)
    serve = project.start("serve")
    project.until(lambda: project.run.steps.count() >= 2, rollout, learn, serve)

    serve.kill()
    project.until(lambda: waits_for(project, "rollout", "inference server"), rollout, learn)
    serve = project.start("serve")
    at = project.run.steps.count()
    project.until(lambda: project.run.steps.count() > at, rollout, learn, serve)

    rollout.kill()
    rollout = project.start("rollout")
    learn.kill()
    learn = project.start("learn")
    assert project.end(learn).code == 0
    assert project.end(rollout).code == 0
    assert serve.poll() is None  # it stays, for the next run of this name
    serve.send_signal(signal.SIGINT)
    assert project.end(serve, 10).code in (0, 130)
    assert project.run.steps.count() == 15


@pytest.mark.slow
def test_breakpoint_works_inline_on_a_terminal(project: Project) -> None:
    """Wait in a reward, then in a workflow."""
    project.code(USER_CODE + STOPS)
    project.set(rollout={"reward": "mine.stops", "workflow": "mine.Stops"})
    command = [sys.executable, "-m", "clew", "train", "run.yaml", "launch.mode=inline"]
    variables = os.environ | {"CLEW_PARENT_PID": str(os.getpid())}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, cwd=project.folder, stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    try:
        assert "mine.py(" in _read_until(ours, "(Pdb) ")
        os.write(ours, b"p data['prompt']\n")
        assert "=" in _read_until(ours, "(Pdb) ")
        os.write(ours, b"c\n")
        _read_until(ours, "(Pdb) ")
        os.write(ours, b"p engine.episode_id\n")
        assert "g000003.e1" in _read_until(ours, "(Pdb) ")
        os.write(ours, b"c\n")
        _read_until(ours, "trained 3 steps")
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert project.run.steps.count() == 3


def _read_until(terminal: int, words: str, seconds: float = PATIENCE_S) -> str:
    shown, deadline = "", time.monotonic() + seconds
    try:
        while words not in shown and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 65536).decode(errors="replace")
    except OSError:  # the process has ended
        pass
    assert words in shown, f"no {words!r} in:\n{shown}"
    return shown
