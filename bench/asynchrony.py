"""Asynchronous training (max_lag 2) against synchronous (max_lag 0), on episodes that also wait for a tool; both
against a simulation without overhead; and the peak memory of each process.

Both are `clew train` with a process each for server, rollout and trainer, on the same groups, with the same latencies.
The simulation knows the same latencies, the admission rule of the product, and the times that a step's computation, a
token of n sequences and a publication take when nothing else runs. It knows nothing of HTTP, polling, recording,
resubmission after an abort, or of processes that share two cores.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.engine import build_model, fixed, with_engine
from bench.memory import PeakMemory
from bench.ratios import show
from bench.tool import latency
from clew.inference.embedded import EmbeddedEngine
from clew.loop.choose_batch import choose_batch
from clew.record.inbox import group_name
from clew.record.run import RunDirectory
from clew.rollout.admission import may_start

GROUPS, SAMPLES, TOKENS = 8, 4, 32
LEFT_OUT = 2
"""Steps at the beginning whose commit does not count: processes start, the first batch is under way."""
COMPUTE = ("advantages", "logprobs", "reference", "forward_backward", "optimizer", "digest")

YAML = """\
experiment: bench
root: {folder}/runs
model: {{path: {folder}/model}}
data: {{path: {folder}/prompts.jsonl}}
rollout: {{workflow: bench.tool.ToolUser, batch_groups: 8, n_samples: 4}}
sampling: {{max_new_tokens: 32, min_new_tokens: 32}}
training: {{steps: {steps}, lr: 1e-5}}
checkpoint: {{every_steps: 1000}}
launch: {{threads: 1}}
"""


class Simulation:
    """A run in virtual time. Every decision is the product's own: `may_start` and `choose_batch`."""

    def __init__(
        self, *, max_lag: int, steps: int, token_s: Callable[[int], float], step_s: float, publish_s: float
    ) -> None:
        """token_s: seconds in which n sequences get a token each. step_s: of the trainer's computation."""
        self.max_lag, self.steps = max_lag, steps
        self.token_s, self.step_s, self.publish_s = token_s, step_s, publish_s
        self.now = 0.0
        self.version = 0
        self.committed: list[float] = []
        self.finished: dict[str, int] = {}
        self.running: dict[str, int] = {}
        self.episodes_left: dict[str, int] = {}
        self.numbers = itertools.count()
        self.in_training: tuple[str, ...] = ()
        self.trainer_busy = False
        self.rows: list[list[Any]] = []
        """Sequences at the server: episode, turn, tokens left."""
        self.arrived: list[list[Any]] = []
        self.server_busy = False
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()

    def run(self) -> list[float]:
        """Return when each step was committed."""
        self.admit()
        while self.version < self.steps:
            self.now, _, event = heapq.heappop(self.events)
            event()
        return self.committed

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), event))

    def admit(self) -> None:
        new = may_start(
            waiting=len(self.finished),
            running=len(self.running),
            max_lag=self.max_lag,
            remaining=(self.steps - self.version) * GROUPS,
            batch_groups=GROUPS,
        )
        for _ in range(new):
            name = group_name(next(self.numbers))
            self.running[name], self.episodes_left[name] = self.version, SAMPLES
            for sample in range(SAMPLES):
                self.generate(f"{name}.e{sample}", turn=0)

    def generate(self, episode: str, turn: int) -> None:
        self.arrived.append([episode, turn, TOKENS])
        if not self.server_busy:
            self.server_step()

    def server_step(self) -> None:
        self.rows += self.arrived
        self.arrived = []
        self.server_busy = bool(self.rows)
        if self.rows:
            self.after(self.token_s(len(self.rows)), self.server_stepped)

    def server_stepped(self) -> None:
        for row in self.rows:
            row[2] -= 1
        done = [row for row in self.rows if row[2] == 0]
        self.rows = [row for row in self.rows if row[2] > 0]
        for episode, turn, _ in done:
            if turn == 0:
                self.after(latency(episode), lambda episode=episode: self.generate(episode, turn=1))
            else:
                self.episode_finished(episode.partition(".")[0])
        self.server_step()

    def episode_finished(self, group: str) -> None:
        self.episodes_left[group] -= 1
        if not self.episodes_left[group]:
            self.finished[group] = self.running.pop(group)
            self.train()

    def train(self) -> None:
        if self.trainer_busy or self.version >= self.steps:
            return
        choice = choose_batch(
            step=self.version,
            finished=self.finished,
            running=self.running,
            batch_groups=GROUPS,
            max_lag=self.max_lag,
            late="wait",
        )
        if choice.groups:
            self.in_training, self.trainer_busy = choice.groups, True
            self.after(self.step_s, self.trained)

    def trained(self) -> None:
        self.committed.append(self.now)
        self.after(self.publish_s, self.published)

    def published(self) -> None:
        self.version += 1
        for group in self.in_training:
            del self.finished[group]
        self.trainer_busy = False
        self.admit()
        self.train()


def measure_tokens() -> Callable[[int], float]:
    """Seconds in which the embedded engine gives n sequences a token each (prefill in equal parts), interpolated."""
    torch.set_num_threads(1)
    counts, seconds = [1, 4, 16, 32, 64, GROUPS * SAMPLES * 3], []
    for count in counts:
        engine = EmbeddedEngine(build_model(), None, max_running=count)
        work, taken = fixed(count, TOKENS), []
        for _ in range(6):
            began = time.perf_counter()
            with_engine(engine, work)
            taken.append((time.perf_counter() - began) / TOKENS)
        seconds.append(statistics.median(taken[1:]))
    return lambda n: float(np.interp(n, counts, seconds))


def train(
    config: Path, max_lag: int, trial: str, peaks: dict[str, float]
) -> tuple[list[float], list[dict[str, float]]]:
    """`clew train`; when each step was committed, and the timings of each."""
    command = [
        sys.executable,
        "-m",
        "clew",
        "train",
        str(config),
        f"rollout.max_lag={max_lag}",
        f"trial={trial}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        with PeakMemory(process.pid) as memory:
            said, _ = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{said}")
    for role, mib in memory.mib.items():
        peaks[role] = max(peaks.get(role, 0.0), mib)
    steps = RunDirectory(config.parent / "runs" / "bench" / trial).steps
    summaries = [steps.read(step) for step in range(steps.count())]
    return [each["committed_at"] for each in summaries], [each["timings"] for each in summaries]


def span(committed: list[float]) -> float:
    """Seconds a step, in the long run."""
    return (committed[-1] - committed[LEFT_OUT - 1]) / (len(committed) - LEFT_OUT)


def main(rounds: int = 2, steps: int = 24) -> None:
    """Print the ratios and the peaks."""
    from bench.step import prepare

    token_s = measure_tokens()
    seconds: dict[int, list[float]] = {0: [], 2: []}
    timings: list[dict[str, float]] = []
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        (folder / "tool.yaml").write_text(YAML.format(folder=folder, steps=steps))
        for turn in range(rounds):
            for max_lag in (0, 2):
                committed, taken = train(folder / "tool.yaml", max_lag, f"lag{max_lag}-{turn}", peaks)
                seconds[max_lag].append(span(committed))
                timings += taken[LEFT_OUT:] if max_lag == 0 else []
    step_s = statistics.median(sum(each.get(part, 0.0) for part in COMPUTE) for each in timings)
    publish_s = statistics.median(each["publish"] for each in timings)
    simulated = {
        lag: span(Simulation(max_lag=lag, steps=steps, token_s=token_s, step_s=step_s, publish_s=publish_s).run())
        for lag in (0, 2)
    }
    measured = {lag: statistics.median(values) for lag, values in seconds.items()}
    ratio, possible = measured[0] / measured[2], simulated[0] / simulated[2]
    show(
        "asynchronous vs synchronous, tool of 0.05 to 2 s",
        ratio,
        "",
        f"{measured[0]:.3f} s / {measured[2]:.3f} s a step",
    )
    show("the same, simulated without overhead", possible, "", f"{simulated[0]:.3f} s / {simulated[2]:.3f} s a step")
    show("share of the simulated ratio", ratio / possible, ">= 0.85", percent=True)
    show("share of the simulated speed, asynchronous", simulated[2] / measured[2], ">= 0.85", percent=True)
    show("share of the simulated speed, synchronous", simulated[0] / measured[0], "", percent=True)
    print(
        f"  the simulation's times, ms: computation of a step {1000 * step_s:.0f}, publication {1000 * publish_s:.0f}, "
        f"a token of 1, 32 and 96 sequences {', '.join(f'{1000 * token_s(n):.2f}' for n in (1, 32, 96))}"
    )
    print("peak memory, MiB: " + ", ".join(f"{role} {mib:.0f}" for role, mib in sorted(peaks.items())), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.steps)
