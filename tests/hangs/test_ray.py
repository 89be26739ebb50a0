"""Programs of Ray, with snapshots made by hand. The suite has real ones."""

from __future__ import annotations

from dataclasses import replace

from clew.hang.judge import Verdict, judge
from clew.hang.observed import Frame, Look, Process, Snapshot, Thread

WORKER = "/x/site-packages/ray/_private/worker.py"
SCRIPT = """import ray
def train(learner, judges):
    for step in range(1000):
        ray.get(learner.train.remote())
        ray.get([generate.remote(1), judges.score.remote(2)])
class Learner:
    def train(self):
        loss.backward()
    def score(self, batch):
        time.sleep(1000)
"""


def process(pid: int, title: str, line: int, op: str = "", parent: int = 2, **counters: tuple[int, int]) -> Process:
    """Return a process at a line of SCRIPT in six looks, in which counters go from one value to another."""
    looks = []
    for n in range(6):
        values = {name: str(first + (last - first) * n // 5) for name, (first, last) in counters.items()}
        inner = [Frame(function=op, file=WORKER, line=1)] if op else []
        user = [Frame(function="train", file="train.py", line=line, locals=values)] if line else []
        looks.append(Look(at=0.5 * n, state="S", switches=n, threads=(_thread(pid, (*inner, *user)),)))
    return Process(
        pid=pid, parent=parent, command=(title,), looks=tuple(looks), waits_in="" if op else "hrtimer_nanosleep"
    )


def _thread(pid: int, frames: tuple[Frame, ...]) -> Thread:
    return Thread(name="MainThread", os_id=pid, frames=frames)


RAYLET = Process(pid=2, parent=1, command=("/x/ray/raylet",))


def judged(*processes: Process) -> Verdict:
    return judge(Snapshot(processes=(RAYLET, *processes), seconds=6.0, sources={"train.py": SCRIPT}))


def driver(line: int, **counters: tuple[int, int]) -> Process:
    return process(1, "python", line, "Worker.get_objects", parent=0, **counters)


def test_a_driver_that_moves_is_enough() -> None:
    computing = process(3, "ray::Learner.train", 8)
    busy = tuple(replace(look, state="R", cpu_s=look.at) for look in computing.looks)
    busy = tuple(replace(each, threads=(replace(each.threads[0], active=True),)) for each in busy)
    assert judged(driver(4, step=(5, 8)), replace(computing, looks=busy, waits_in="")).pattern == "healthy"


def test_the_driver_waits_for_those_that_run_what_its_line_calls() -> None:
    scores = process(4, "ray::Judge.score", 10)
    verdict = judged(
        driver(5), scores, process(5, "ray::Other.work", 8), process(6, "ray::IDLE", 0, "Worker.main_loop")
    )
    assert verdict.pids == (4,) and verdict.sites == ("train.py:10",)


def test_a_task_has_a_title_without_a_class() -> None:
    verdict = judged(driver(5), process(4, "ray::generate", 10), process(5, "ray::Other.work", 8))
    assert verdict.pids == (4,)


def test_if_nothing_runs_ray_may_not_have_started_it() -> None:
    verdict = judged(driver(4), process(6, "ray::Learner", 0, "Worker.main_loop"))
    assert (verdict.pattern, verdict.pids, verdict.sites) == ("external wait", (1,), ("train.py:4",))
    assert "ray status" in verdict.next


def test_if_no_process_of_ray_was_seen_the_others_have_to_be_named() -> None:
    verdict = judge(Snapshot(processes=(driver(4),), seconds=6.0, sources={"train.py": SCRIPT}))
    assert verdict.pattern == "undetermined" and "--pid" in verdict.explanation
