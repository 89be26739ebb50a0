"""`clew train` on several trainer ranks: killed, interrupted, failing on one alone; replayed on as many and on one."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.end_to_end.project import USER_CODE, Project
from tests.end_to_end.test_signals import interrupt
from tests.forked import clew

pytestmark = pytest.mark.slow

ENDS_IN_S = 10.0


def start(project: Project, until_step: int) -> subprocess.Popen:
    process = project.start("train")
    project.until(lambda: project.run.steps.count() >= until_step, process)
    return process


def replay(project: Project, *options: str) -> str:
    return said_by(project, "replay", str(project.path), *options)


def said_by(project: Project, *arguments: str) -> str:
    terminal = project.folder / "said.txt"
    with clew(*arguments, cwd=project.folder, output=terminal) as process:
        code = process.wait(300)
    assert code == 0, terminal.read_text()
    return terminal.read_text()


def test_a_killed_rank_ends_the_run_which_goes_on_and_replays_on_any_number_of_ranks(project):
    project.set(launch={"ranks": 2}, training={"steps": 6}, checkpoint={"every_steps": 2})
    process = start(project, until_step=2)
    os.kill(project.status("trainer-1")["pid"], signal.SIGKILL)
    ended = project.end(process, seconds=ENDS_IN_S)
    assert ended.code == 2 and "trainer rank 1 of 2 was killed by signal 9" in ended.error
    before = project.run.steps.index()

    project.clew("train", "launch.colocate=true")
    index = project.run.steps.index()
    assert index[: len(before)] == before and len(index) == 6
    assert "release" in project.run.steps.read(5)["timings"]
    for options, how in ((["--ranks", "2"], "bit for bit"), ([], "ranks 2 recorded, 1 here")):
        said = replay(project, *options)
        assert how in said and "steps 0 to 5: every stage agrees" in said


def test_a_run_of_ranks_that_split_the_blocks_and_broadcast_them_replays_on_any_number(project):
    project.set(launch={"ranks": 2}, training={"tp": 2}, weights={"via": "collective"})
    assert project.clew("train").code == 0
    for options, how in ((["--ranks", "2"], "bit for bit"), ([], "ranks 2 recorded, 1 here; tp 2 recorded, 1 here")):
        said = replay(project, *options)
        assert how in said and "steps 0 to 2: every stage agrees" in said
    assert "from step 2 on with training.lr=0.1" in replay(project, "--steps", "2", "training.lr=0.1")


def test_a_server_that_is_killed_is_sent_the_newest_weights_again(project):
    project.set(launch={"ranks": 2, "restarts": 3}, training={"steps": 8}, weights={"via": "collective"})
    process = start(project, until_step=2)
    os.kill(project.status("server")["pid"], signal.SIGKILL)
    ended = project.end(process, seconds=300)
    assert ended.code == 0 and project.run.steps.count() == 8
    assert all(step["metrics"]["behaviour_gap_max"] < 1e-4 for step in map(project.run.steps.read, range(8)))


def test_training_goes_on_from_a_later_step_on_any_number_of_ranks(project):
    project.set(launch={"ranks": 2})
    assert project.clew("train").code == 0
    later = ("debug.replay_rollout_data=true", f"debug.path={project.path}", "debug.first_step=2")
    alone = "compared bit for bit up to step 1, then within 0.001 + 0.001 x |recorded| (ranks: 2 → 1)"
    both, one = ("train", "both", "launch.ranks=2"), ("learn", "alone", "launch.ranks=1")
    for (command, trial, ranks), how in (both, "compared bit for bit\n"), (one, alone):
        ended = project.clew(command, *later, f"trial={trial}", ranks)
        assert ended.code == 0 and ended.output.count("trained 3 steps") == 1
        assert how in said_by(project, "diff", str(project.path), str(project.path.parent / trial))


def test_the_rank_that_failed_first_is_named(project):
    project.code(
        USER_CODE
        + "import os\n"
        + "def loss(*, logprobs_N, advantages_N):\n"
        + "    if os.environ['RANK'] == '1':\n"
        + "        raise ValueError('this is the cause')\n"
        + "    return -logprobs_N * advantages_N, {}\n"
    )
    project.set(launch={"ranks": 2}, algorithm={"loss": "mine.loss"})
    ended = project.clew("train")
    assert ended.code == 2 and "trainer rank 1 of 2: " in ended.error and "this is the cause" in ended.error


def test_a_rank_that_fails_while_a_collective_is_pending_ends_the_run_at_once(project):
    """Destroying the process group would wait for the other rank, which trains on, or waits for this one."""
    project.code(
        USER_CODE
        + "import os, torch\n"
        + "from torch import distributed as dist\n"
        + "def loss(*, logprobs_N, advantages_N):\n"
        + "    if os.environ['RANK'] == '1':\n"
        + "        dist.all_reduce(torch.ones(1000), async_op=True)\n"
        + "        Path('raised').touch()\n"
        + "        raise ValueError('this is the cause')\n"
        + "    time.sleep(60)\n"
    )
    project.set(launch={"ranks": 2}, algorithm={"loss": "mine.loss"})
    process = project.start("train")
    project.until(lambda: (project.folder / "raised").exists(), process)
    ended = project.end(process, seconds=ENDS_IN_S)
    assert ended.code == 2 and "trainer rank 1 of 2: " in ended.error and "this is the cause" in ended.error


def test_ctrl_c_ends_all_ranks_where_they_can_go_on(project):
    project.set(launch={"ranks": 2}, training={"steps": 500})
    interrupt(project, start(project, until_step=1))
    done = project.run.steps.count()
    assert (project.path / "checkpoints" / f"step-{done:06d}").exists()


def test_a_critic_beside_adapters_trains_and_replays_on_ranks(project):
    project.set(launch={"ranks": 2}, algorithm={"preset": "ppo", "minibatches": 2}, training={"lora_rank": 2})
    assert project.clew("train").code == 0
    for options, how in ((["--ranks", "2"], "bit for bit"), ([], "ranks 2 recorded, 1 here")):
        said = replay(project, *options)
        assert how in said and "steps 0 to 2: every stage agrees" in said
