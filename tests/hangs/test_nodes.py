"""Several nodes: `--ssh` with a stand-in for ssh, and merging reports of nodes, of which some may be missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clew.errors import ConfigError, LaunchError
from clew.hang.dumps import read_dumps
from clew.hang.nodes import gather, over_ssh
from clew.hang.observed import Frame, Group, Inside, Look, Process, Snapshot, Thread
from clew.hang.reduce import reduced, to_judge
from clew.hang.report import Report
from clew.hang.roles import actors_of

SSH = """#!/bin/sh
# Stands in for ssh: runs the command here, as the host that was named.
while [ "$1" != "--" ]; do shift; done
if [ "$2" = "down" ]; then echo "ssh: connect to host down port 22: No route to host" >&2; exit 255; fi
if [ "$2" = "silent" ]; then exec sleep 60; fi
exec sh -c "$3"
"""
RANK = "import time\nprint('ready', flush=True)\ndef train():\n    time.sleep(600)\ntrain()\n"
TORCH = "/x/torch/distributed/distributed_c10d.py"


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a job of one process that has the variables of a rank."""
    name = f"127.0.0.1:{40_000 + os.getpid() % 20_000}"
    (tmp_path / "train.py").write_text(RANK)
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": name.partition(":")[2]}
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "train.py")], stdout=subprocess.PIPE, env=environment, cwd=tmp_path
    )
    with process:
        assert process.stdout is not None and process.stdout.readline()
        yield name
        process.kill()


def test_a_job_is_examined_over_ssh_and_a_host_that_is_down_is_named(ssh: None, job: str) -> None:
    command = [sys.executable, "-m", "clew", "hang", "--ssh", "node1", "--ssh", "down", "--job", job]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "rank 0 (pid " in ended.stdout and "train.py:4" in ended.stdout, ended.stdout + ended.stderr
    assert "down gave no report: ssh: connect to host down port 22: No route to host" in ended.stdout


def test_a_folder_named_clew_is_not_the_package(ssh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose Python has no Clew, where the repository was cloned into the home folder."""
    (tmp_path / "clew").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, script in (("bare", f'exec {sys.executable} -S "$@"'), ("bin/clew", "echo no such job >&2; exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare"))
    with pytest.raises(LaunchError, match="node1: no such job"):
        gather(over_ssh(["node1"], []))


def test_a_host_that_is_silent_is_given_up(ssh: None) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchError, match="silent: no answer within 1 s"):
        gather(over_ssh(["silent"], []), limit_s=1.0)
    assert time.monotonic() - began < 10


def test_a_host_is_no_option_of_ssh() -> None:
    with pytest.raises(ConfigError, match="does not begin with a dash"):
        over_ssh(["-oProxyCommand=touch /tmp/owned"], [])


def test_a_job_that_is_not_here_is_named(ssh: None) -> None:
    with pytest.raises(LaunchError, match=r"Cannot look at the job 1\.2\.3\.4:5"):
        gather(over_ssh(["node1"], ["--job", "1.2.3.4:5"]))


# Reports of nodes ----------------------------------------------------------------------------------------------------


def rank(number: int, *, per_node: int = 8, world: int = 512, op: str = "all_reduce", clock: float = 0.0) -> Process:
    """Return a rank that is in a collective; each node has the same pids, and a clock of its own."""
    user = Frame(function="train", file="/job/train.py", line=7, locals={"step": "3"})
    frames = (Frame(function=op, file=TORCH, line=1), user) if op else (replace(user, line=9),)
    pid = 100 + number % per_node
    looks = tuple(
        Look(at=clock + 0.5 * n, state="S", switches=7, threads=(Thread(name="MainThread", os_id=pid, frames=frames),))
        for n in range(6)
    )
    host = f"node{number // per_node}"
    waits = "futex_do_wait" if op else "hrtimer_nanosleep"
    one = Process(pid=pid, host=host, looks=looks, waits_in=waits, command=("python",))
    return replace(one, rank=number, world=world, local_world=per_node)


SOURCE = {
    "/job/train.py": "import time\nimport torch.distributed as dist\n\n\ndef train():\n    while True:\n"
    "        dist.all_reduce(values)\n        if rank == 77:\n            time.sleep(1000)\n"
}


def write_nodes(folder: Path, nodes: range, *, odd: int = -1) -> None:
    for node in nodes:
        ranks = range(8 * node, 8 * node + 8)
        every = tuple(rank(n, op="" if n == odd else "all_reduce", clock=1e6 * node) for n in ranks)
        report = Report(Snapshot(processes=every, seconds=3.0, sources=SOURCE))
        (folder / f"node{node}.json").write_text(json.dumps(report.as_json()))


def test_ranks_of_different_groups_are_kept_apart_in_a_merge(tmp_path: Path) -> None:
    """Only the source says which ranks a group has: all of them are at one line, with a group of one name."""
    text = "def train():\n    half = dist.new_group(list(range(rank // 8 * 8, rank // 8 * 8 + 8)))\n\n\n\n\n"
    sources = {"/job/train.py": f"{text}    dist.all_reduce(values, group=half)\n"}
    every = [rank(number, world=16) for number in range(16)]
    for node in range(2):
        seen = Snapshot(processes=tuple(every[8 * node : 8 * node + 8]), sources=sources)
        (tmp_path / f"node{node}.json").write_text(json.dumps(Report(seen).as_json()))
    at_once = reduced(Snapshot(processes=tuple(every), sources=sources))
    assert [each.rank for each in read_dumps(tmp_path).processes] == [each.rank for each in at_once.processes]
    assert len(at_once.processes) == 4


def test_a_rank_among_64_nodes_is_found_although_their_clocks_differ(tmp_path: Path) -> None:
    write_nodes(tmp_path, range(64), odd=77)
    report = Report(read_dumps(tmp_path))
    assert (report.verdict.pattern, report.verdict.ranks) == ("missing rank", (77,))
    assert report.hosts == ["node9"] and report.count == 512
    assert [pairs for _, pairs in report.classes.items()] == [((0, 76), (78, 511)), ((77, 77),)]
    assert sum(map(len, [report.judged.processes])) < 300 and "judged by" in report.verdict.notes[0]


def test_three_of_64_reports_that_are_missing_are_not_called_dead(tmp_path: Path) -> None:
    write_nodes(tmp_path, range(3, 64))
    verdict = Report(read_dumps(tmp_path)).verdict
    assert (verdict.pattern, verdict.ranks, verdict.exit_code) == ("undetermined", (), 3)
    assert "ranks 0-23 were not seen" in verdict.explanation


def test_with_reports_missing_a_rank_that_was_seen_is_still_found_but_less_surely(tmp_path: Path) -> None:
    write_nodes(tmp_path, range(3, 64), odd=77)
    verdict = Report(read_dumps(tmp_path)).verdict
    assert (verdict.pattern, verdict.ranks, verdict.confidence) == ("missing rank", (77,), "medium")
    assert "ranks 0-23 were not seen" in verdict.notes[-1]


def test_a_rank_that_is_missing_on_a_node_that_was_seen_is_dead(tmp_path: Path) -> None:
    write_nodes(tmp_path, range(64))
    every = tuple(rank(n) for n in range(8, 16) if n != 11)
    report = Report(Snapshot(processes=every, seconds=3.0, unseen=tuple({*range(512)} - {*range(8, 16)})))
    (tmp_path / "node1.json").write_text(json.dumps(report.as_json()))
    verdict = Report(read_dumps(tmp_path)).verdict
    assert (verdict.pattern, verdict.ranks) == ("dead", (11,))


def test_reducing_in_two_levels_gives_the_same_as_at_once(tmp_path: Path) -> None:
    write_nodes(tmp_path, range(8), odd=33)
    at_once = read_dumps(tmp_path)
    halves = tmp_path / "halves"
    halves.mkdir()
    for half in (0, 1):
        folder = tmp_path / f"half{half}"
        folder.mkdir()
        for node in range(4 * half, 4 * half + 4):
            (tmp_path / f"node{node}.json").rename(folder / f"node{node}.json")
        (halves / f"{half}.json").write_text(json.dumps(Report(read_dumps(folder)).as_json()))
    again = read_dumps(halves)
    assert Report(again).classes == Report(at_once).classes
    assert Report(again).verdict.ranks == Report(at_once).verdict.ranks == (33,)
    assert len(again.processes) == len(at_once.processes) == 3


def test_ranks_in_different_calls_are_never_alike() -> None:
    one, other = rank(0, world=2, per_node=2), rank(1, world=2, per_node=2)
    for name, value in (("step", "4"), ("src", "0")):
        frames = one.threads[0].frames
        changed = (*frames[:-1], replace(frames[-1], locals={"step": "3", name: value}))
        looks = tuple(replace(look, threads=(replace(look.threads[0], frames=changed),)) for look in other.looks)
        every = Snapshot(processes=(one, one, replace(other, looks=looks)))
        assert not any(each.alike for each in reduced(every).processes)
    groups = [Group(at=64, name="world", members=(0, 1, 2, 3), rank=n) for n in range(4)]
    each_read = [replace(rank(n, world=4, per_node=4), inside=Inside(groups=(groups[n],))) for n in range(4)]
    four = Snapshot(processes=tuple(each_read))
    (first, second) = reduced(four).processes
    assert [number for number, _, _ in first.alike] == [2, 3] and not second.alike
    assert {actor.rank for actor in actors_of(to_judge(reduced(four)))} == {0, 1, 2, 3}
