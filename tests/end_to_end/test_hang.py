"""A run of `clew train` that makes no progress: it is diagnosed by itself, and then as hang.action says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from clew.config import load
from clew.errors import LaunchError
from clew.launch.no_progress import LOOK_S, Hang, Watch
from clew.launch.supervisor import _end_if_hopeless
from clew.processes import free_port
from clew.record.run import RunDirectory
from tests.end_to_end.project import USER_CODE, Project

BLOCKED = """
import threading

def blocked(completion, data):
    if Path("block").exists():
        Path("block").unlink()
        threading.Event().wait()
    return digits(completion, data)
"""


ANSWERS = """#!/bin/sh
while [ "$1" != --json ]; do shift; done
[ -z "{writes}" ] || echo '{{"pattern": "p", "explanation": "e"}}' > "$2"
touch {answered}
exit {code}
"""


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("writes", ["", "yes"])
def test_a_diagnosis_without_a_report_and_one_that_came_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: str, goes_on: bool
) -> None:
    """Python itself exits with 1, as `clew hang` does after a hang, when it cannot import a module."""
    run, answered = RunDirectory(tmp_path / "run"), tmp_path / "answered"
    python = tmp_path / "python"
    python.write_text(ANSWERS.format(code=1, writes=writes, answered=answered))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    watch = Watch(run, 0.1)
    run.steps.json_path(0).write_text("{}")
    deadline = time.monotonic() + 30
    while not answered.exists():
        assert watch.look() is None and time.monotonic() < deadline
    if goes_on:
        (run.status / "trainer.json").write_text('{"doing": "trains", "waits": []}')
    time.sleep(LOOK_S)
    found = watch.look()
    warned = run.warnings_path.read_text() if run.warnings_path.exists() else ""
    if goes_on:
        assert found is None and not warned and list(run.reports.iterdir()) == []
    elif writes:
        assert found is not None and found.pattern == "p" and found.report.exists()
    else:
        assert found is None and "could not say why" in warned


def test_a_stopped_server_with_its_last_tokens_per_second_makes_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = RunDirectory(tmp_path / "run"), list[float]()
    watch = Watch(run, 0.1)
    monkeypatch.setattr(watch, "_ask", asked.append)
    run.steps.json_path(0).write_text("{}")
    waits = {"doing": "waits", "waits": [{"unblocks": "rollout"}]}
    for name, status in {"trainer": waits, "server": {"doing": "serves", "waits": [], "tokens_per_s": 50.0}}.items():
        (run.status / f"{name}.json").write_text(json.dumps(status))
    deadline = time.monotonic() + 30
    while not asked:
        assert watch.look() is None and time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_run_without_progress_is_diagnosed_started_again_once_and_ended(project: Project) -> None:
    """A reward waits forever, with its own time limit far away; after the restart another one does."""
    project.code(USER_CODE + BLOCKED)
    rollout = {"reward": "mine.blocked", "reward_timeout_s": 900}
    hang = {"after_s": 4, "action": "restart"}
    project.set(rollout=rollout, training={"steps": 1000}, launch={"restarts": 1}, hang=hang)
    process, block = project.start("train"), project.folder / "block"
    for _ in range(2):
        at = project.run.steps.count()
        project.until(lambda at=at: project.run.steps.count() > at + 1, process)
        block.touch()
        project.until(lambda: not block.exists(), process)
    ended = project.end(process)
    assert ended.code == 2 and "no progress for " in ended.error and "(report: " in ended.error, ended.output
    assert "Starting the processes again 1 times" in ended.error
    report = max(project.run.reports.glob("hang-*.json"))
    verdict = json.loads(report.read_text())
    assert verdict["exit_code"] == 1 and verdict["pattern"] in ended.error
    assert "reward mine.blocked" in report.read_text()
    assert report.with_suffix(".html").read_text().startswith("<!doctype html>")
    assert "warning (supervisor, step " in ended.output


@pytest.mark.parametrize(("action", "hung_at"), [("abort", []), ("restart", []), ("restart", [0])])
def test_a_hang_ends_the_run_or_starts_it_again(project: Project, action: str, hung_at: list[int]) -> None:
    project.set(hang={"action": action})
    found = Hang(pattern="p", explanation="e", quiet_s=4.0, report=project.folder / "hang.json", started=True)
    hopeless = action == "abort" or hung_at
    with pytest.raises(LaunchError, match=r"no progress for 4 s at step 0 of 3: p\. e") if hopeless else nullcontext():
        _end_if_hopeless(load(project.folder / "run.yaml"), project.run, found, hung_at)
    assert hung_at == ([] if action == "abort" else [0])


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_the_run_goes_on_after_a_warning(project: Project) -> None:
    project.set(launch={"ranks": 2}, training={"steps": 6}, hang={"after_s": 4})
    process = project.start("train")
    project.until(lambda: project.run.steps.count() >= 2, process)
    pid = project.status("trainer-1")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        project.until(project.run.warnings_path.exists)
    finally:
        os.kill(pid, signal.SIGCONT)
    warned = project.run.warnings_path.read_text()
    assert "stopped" in warned and f"pid {pid}" in warned
    assert project.end(process).code == 0


@pytest.mark.slow
def test_supervised_training_under_torchrun_watches_itself(project: Project) -> None:
    project.prompts([{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(16)])
    project.set(launch={"ranks": 2}, training={"steps": 100_000, "batch_size": 4})
    project.set(hang={"after_s": 4, "action": "abort"})
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    with (project.folder / "terminal").open("wb") as terminal:
        process = subprocess.Popen(
            [*command, "-m", "clew", "sft", "run.yaml"], cwd=project.folder, stdout=terminal, stderr=terminal
        )
    try:
        project.until(lambda: project.run.steps.count() >= 2, process)
        pid = project.status("trainer-1")["pid"]
        os.kill(pid, signal.SIGSTOP)
        first = project.status("trainer")["pid"]
        project.until(lambda: not psutil.pid_exists(first) or psutil.Process(first).status() == psutil.STATUS_ZOMBIE)
    finally:
        for each in psutil.Process(process.pid).children(recursive=True):
            each.kill()
        process.kill()
        process.wait()
    said = (project.folder / "terminal").read_text()
    assert f"stopped. Rank 1 (pid {pid}) is stopped" in said, said
    verdict = json.loads(max(project.run.reports.glob("hang-*.json")).read_text())
    assert (verdict["pattern"], verdict["ranks"]) == ("stopped", [1])
