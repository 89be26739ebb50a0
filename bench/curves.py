"""Train the addition example through each engine, from one start model with the same seeds: compare the curves.

    CLEW_VLLM_PYTHON=... CLEW_SGLANG_PYTHON=... python -m bench.curves

Each variable names the Python of an environment with that server (tests/engines/install.py builds one and prints its
Python); an engine whose variable is not set is left out. The start model is the demo's, trained once in --folder by
`clew sft`. The first seed runs through each engine, then the second. Engines draw different tokens from the same seed,
so only their curves can agree. The difference between two seeds of one engine shows how much of a gap is noise.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from clew.record.run import open_run
from examples.addition.make import make

EXAMPLE = "examples/addition"
SERVERS = {
    "vllm": ("inference.cache_gib=1", "inference.args={enforce-eager: true, no-enable-chunked-prefill: true}"),
    "sglang": (),
}
"""Fields that a server needs on a CPU."""


@dataclass(frozen=True)
class Curve:
    """Curve and final figures of one run."""

    engine: str
    seed: int
    quarters: list[float]
    """Mean training reward of each quarter of the steps."""
    held_out: tuple[float, float]
    """Share of held-out problems that are solved, before and after."""
    k3: float
    """Largest mismatch_k3 of any step: how far trainer and engine disagree about tokens without lag."""
    lag: float
    """Mean over the steps of lag_mean, in versions."""
    step_s: float
    """Median of the seconds between two commits."""

    def row(self) -> str:
        """Return its line of the table."""
        before, after = self.held_out
        cells = [
            self.engine,
            str(self.seed),
            *(f"{reward:.3f}" for reward in self.quarters),
            f"{before:.1%}",
            f"{after:.1%}",
            f"{self.k3:.1e}",
            f"{self.lag:.2f}",
            f"{self.step_s:.1f}",
        ]
        return f"| {' | '.join(cells)} |"


HEADER = """\
| engine | seed | reward, 1st quarter | 2nd | 3rd | 4th | held out before | after | k3 | lag | seconds a step |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def clew(*arguments: str) -> None:
    """Run a Clew command. If it fails, end this program and print the command's output."""
    command = [sys.executable, "-m", "clew", *arguments]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}")


def make_start_model(folder: Path) -> None:
    """Make the problems and train the imitator, unless they are there."""
    done = folder / "addition" / "started"
    if done.exists():
        return
    shutil.rmtree(folder / "addition", ignore_errors=True)
    make(folder / "addition" / "material", 1)
    clew("sft", f"{EXAMPLE}/sft.yaml", f"root={folder}")
    done.touch()


def train(folder: Path, engine: str, seed: int, steps: int, groups: int) -> None:
    """Train from the start model."""
    trial = f"{engine}-{seed}"
    shutil.rmtree(folder / "addition" / trial, ignore_errors=True)  # `clew train` would resume it
    fields = [f"root={folder}", f"trial={trial}", f"seed={seed}", f"inference.backend={engine}"]
    fields += [f"training.steps={steps}", f"rollout.batch_groups={groups}", f"eval.every_steps={steps}"]
    if engine in SERVERS:
        fields += [f"inference.python={os.environ[variable(engine)]}", *SERVERS[engine]]
    clew("train", f"{EXAMPLE}/grpo.yaml", *fields)


def read_curve(folder: Path, engine: str, seed: int) -> Curve:
    """Return the curve of a run that has ended."""
    run = open_run(folder / "addition" / f"{engine}-{seed}")
    steps = run.steps.count()
    summaries = [run.steps.read(step) for step in range(steps)]
    metrics = [summary["metrics"] for summary in summaries]
    rewards = [each["reward"] for each in metrics]
    committed = [summary["committed_at"] for summary in summaries]
    evaluations = [evaluation["pass@1"] for evaluation in run.evals.read_all()]
    return Curve(
        engine=engine,
        seed=seed,
        quarters=[statistics.mean(rewards[steps * i // 4 : steps * (i + 1) // 4]) for i in range(4)],
        held_out=(evaluations[0], evaluations[-1]),
        k3=max(each["mismatch_k3"] for each in metrics if "mismatch_k3" in each),
        lag=statistics.mean(each["lag_mean"] for each in metrics),
        step_s=statistics.median(after - before for before, after in itertools.pairwise(committed)),
    )


def variable(engine: str) -> str:
    """Return the name of the environment variable that names the engine's Python."""
    return f"CLEW_{engine.upper()}_PYTHON"


def largest_gap(one: Curve, other: Curve) -> float:
    """Return the largest difference between two curves: of a quarter's reward, or of the held-out share at the end."""
    ends = [(*curve.quarters, curve.held_out[1]) for curve in (one, other)]
    return max(abs(a - b) for a, b in zip(*ends, strict=True))


def main() -> None:
    """Print a line for each run as it ends, then the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/curves"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=32, help="prompts a step, with 8 samples each")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    engines = ["embedded", *(engine for engine in SERVERS if os.environ.get(variable(engine)))]
    for engine in SERVERS:
        if engine not in engines:
            print(f"{engine} is left out: {variable(engine)} names no Python")
    began = time.monotonic()
    make_start_model(options.folder)
    print(HEADER, flush=True)
    curves: list[Curve] = []
    for seed, engine in itertools.product(options.seeds, engines):
        train(options.folder, engine, seed, options.steps, options.groups)
        curves.append(read_curve(options.folder, engine, seed))
        print(curves[-1].row(), flush=True)
    print("\nlargest difference of a quarter's reward or of the held-out share after training:")
    for one, other in itertools.combinations(curves, 2):
        if one.engine == other.engine or one.seed == other.seed:
            print(f"  {one.engine} {one.seed} / {other.engine} {other.seed}: {largest_gap(one, other):.3f}")
    print(f"{time.monotonic() - began:.0f} s; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
