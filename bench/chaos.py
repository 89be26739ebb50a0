"""Kill random processes of a run with SIGKILL, start `clew train` again, and check that the run is still sound.

    make chaos                                  100 kills over several runs, about a quarter of an hour
    python -m bench.chaos --kills 10 --seed 3   10 kills at other moments

A run is sound if

- after each kill, every step recorded before still has the same digests;
- after each death of the supervisor or the trainer, no process of the run is left;
- at its end, every finished group that was seen was trained on once, was rejected, or still waits in the inbox;
- trained again from its first checkpoint alone, it has the recorded weights at every step.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from clew.record.run import RunDirectory
from examples.addition.make import make

VICTIMS = ("supervisor", "trainer", "rollout", "server", "reward worker")
COMMANDS = {"train": "supervisor", "learn": "trainer", "rollout": "rollout", "serve": "server"}

YAML = """\
experiment: chaos
root: {folder}/runs
model: {{path: {folder}/material/base}}
data: {{path: {folder}/material/prompts.jsonl}}
rollout: {{reward: bench.rewards.digits, batch_groups: 4, n_samples: 4, late: {late}}}
sampling: {{max_new_tokens: 12}}
training: {{steps: {steps}, lr: 1e-3}}
eval: {{path: {folder}/material/held_out.jsonl, every_steps: 15}}
checkpoint: {{every_steps: 7}}
launch: {{restarts: 1000, threads: 1}}
"""


@dataclass
class Tally:
    """Observations of one run."""

    lag: int
    late: str
    kills: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    steps: int = 0
    groups: int = 0
    lost: int = 0
    twice: int = 0
    changed: int = 0
    orphans: int = 0
    replayed: str = ""

    @property
    def sound(self) -> bool:
        return not (self.lost or self.twice or self.changed or self.orphans) and self.replayed == "equal"


class Run:
    """A run to be killed."""

    def __init__(self, folder: Path, *, lag: int, late: str, steps: int, chance: random.Random) -> None:
        self.tally = Tally(lag=lag, late=late)
        self.chance = chance
        self.steps = steps
        self.folder = folder
        make(folder / "material", seed=chance.randrange(1000))
        held_out = folder / "material" / "held_out.jsonl"
        held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:20]))
        self.config = folder / "chaos.yaml"
        self.config.write_text(YAML.format(folder=folder, late=late, steps=steps))
        self.options = [f"rollout.max_lag={lag}", f"algorithm.minibatches={chance.choice([1, 2])}"]
        self.run = RunDirectory(folder / "runs" / "chaos" / "0")
        self.digests: dict[int, dict] = {}
        self.finished: set[str] = set()

    def start(self) -> subprocess.Popen[bytes]:
        self.tally.starts += 1
        with (self.folder / "train.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "clew", "train", str(self.config), *self.options],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def processes(self, supervisor: subprocess.Popen[bytes]) -> dict[psutil.Process, str]:
        """Return the run's live processes and their roles."""
        found: dict[psutil.Process, str] = {}
        try:
            whole = psutil.Process(supervisor.pid)
            family = [whole, *whole.children(recursive=True)]
        except psutil.NoSuchProcess:
            return {}
        for process in family:
            try:
                command = process.cmdline()
                if process.status() == psutil.STATUS_ZOMBIE or "resource_tracker" in " ".join(command):
                    continue
                words = [word for word in command[1:] if word != "-P"]
                found[process] = COMMANDS.get(words[2], "other") if words[:2] == ["-m", "clew"] else "reward worker"
            except (psutil.NoSuchProcess, psutil.ZombieProcess, IndexError):
                continue
        return found

    def look(self) -> None:
        """Check digests, note new groups."""
        for entry in self.run.steps.index():
            before = self.digests.setdefault(entry["step"], entry["digests"])
            self.tally.changed += before != entry["digests"]
        self.finished |= self.run.inbox.names()

    def until_done(self, budget: int) -> int:
        """Kill until the run is complete or `budget` kills are spent; then let it complete. Return the kills spent."""
        spent = 0
        supervisor = self.start()
        while supervisor.poll() is None or supervisor.returncode != 0:
            if supervisor.poll() is not None:
                supervisor = self.start()
            if spent >= budget:
                code = supervisor.wait(timeout=600)
                if code != 0:
                    raise SystemExit(f"after all kills, the run ended with {code}:\n" + self.log_tail())
                break
            deadline = time.monotonic() + self.chance.uniform(0.3, 9.0)
            while time.monotonic() < deadline and supervisor.poll() is None:
                time.sleep(0.05)
            if supervisor.poll() is not None:
                if supervisor.returncode not in (0, -signal.SIGKILL):
                    raise SystemExit(f"the run ended with {supervisor.returncode}:\n" + self.log_tail())
                continue
            spent += self.kill_one(supervisor)
        self.look()
        return spent

    def kill_one(self, supervisor: subprocess.Popen[bytes]) -> int:
        self.look()
        alive = self.processes(supervisor)
        kinds = sorted(set(alive.values()) & set(VICTIMS))
        if not kinds:
            return 0
        kind = self.chance.choice(kinds)
        victim = self.chance.choice([process for process, name in alive.items() if name == kind])
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            return 0
        self.tally.kills[kind] += 1
        if kind in ("supervisor", "trainer"):
            supervisor.wait(timeout=30)
            _, left = psutil.wait_procs(list(alive), timeout=5)
            self.tally.orphans += len(left)
            for process in left:
                process.kill()
        self.look()
        return 1

    def check(self) -> None:
        """Fill in the tally of the complete run."""
        tally = self.tally
        tally.steps = self.run.steps.count()
        consumed = [group for entry in self.run.steps.index() for group in entry["groups"]]
        tally.groups = len(consumed)
        tally.twice = len(consumed) - len(set(consumed))
        tally.lost = len(self.finished - set(consumed) - self.run.rejected_groups() - self.run.inbox.names())
        tally.replayed = self.replay()

    def replay(self) -> str:
        """Train the whole run again in a copy with only the first checkpoint. `clew learn` verifies each step.

        Returns:
            "equal", or the end of the error output.
        """
        copy = self.folder / "copy" / "chaos" / "0"
        shutil.copytree(self.run.path, copy)
        for checkpoint in copy.glob("checkpoints/step-*"):
            if checkpoint.name != "step-000000":
                shutil.rmtree(checkpoint)
        again = subprocess.run(
            [sys.executable, "-m", "clew", "learn", str(self.config), *self.options, f"root={self.folder / 'copy'}"],
            capture_output=True,
            text=True,
        )
        return "equal" if again.returncode == 0 else again.stderr[-600:]

    def log_tail(self) -> str:
        return (self.folder / "train.log").read_text()[-3000:]


def chaos(kills: int, seed: int, steps: int = 80) -> list[Tally]:
    """Kill `kills` processes in one run after another, and return a tally of each run."""
    chance = random.Random(seed)
    tallies: list[Tally] = []
    while kills > 0:
        folder = Path(tempfile.mkdtemp(prefix="clew-chaos-"))
        lag, late = chance.choice([0, 1, 2]), chance.choice(["wait", "train"])
        run = Run(folder, lag=lag, late=late, steps=steps, chance=chance)
        kills -= run.until_done(budget=min(kills, 25))
        run.check()
        tallies.append(run.tally)
        if run.tally.sound:
            shutil.rmtree(folder)
        else:
            print(f"kept to inspect: {folder}\n{run.log_tail()}")
    return tallies


def table(tallies: list[Tally]) -> Table:
    """A row per run."""
    drawn = Table(title="kill -9 at random moments, then `clew train` again", title_justify="left")
    for column in (
        "lag",
        "late",
        *VICTIMS,
        "starts",
        "steps",
        "groups",
        "lost",
        "twice",
        "changed digests",
        "orphans",
        "trained again",
    ):
        drawn.add_column(column, justify="right")
    for tally in tallies:
        drawn.add_row(
            str(tally.lag),
            tally.late,
            *(str(tally.kills[victim]) for victim in VICTIMS),
            str(tally.starts),
            str(tally.steps),
            str(tally.groups),
            str(tally.lost),
            str(tally.twice),
            str(tally.changed),
            str(tally.orphans),
            tally.replayed,
        )
    return drawn


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()
    seen = chaos(arguments.kills, arguments.seed)
    Console(width=None if sys.stdout.isatty() else 180).print(table(seen))
    total = sum(sum(tally.kills.values()) for tally in seen)
    print(f"{total} kills in {len(seen)} runs, {time.monotonic() - began:.0f} s")
    raise SystemExit(not all(tally.sound for tally in seen))
