"""The demo: a small base model imitates an imperfect teacher (SFT), then passes it by reinforcement (GRPO).

make demo                                    about three minutes on two cores
python -m examples.addition.demo --seed 2    other problems, weights and episodes
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from clew.config import load
from clew.errors import ClewError
from clew.record.run import open_run
from examples.addition.make import make

HERE = Path("examples/addition")


def clew(*arguments: str) -> float:
    """Run a command of Clew, as one would type it; returns its seconds."""
    print("$ clew", *arguments, flush=True)
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-m", "clew", *arguments])
    if ended.returncode != 0:
        raise SystemExit(ended.returncode)
    return time.monotonic() - began


def sparkline(values: list[float]) -> str:
    """Shares as a row of blocks."""
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(value * 8))] for value in values)


def is_complete(path: Path) -> bool:
    """Return whether a run is there and has all of its steps."""
    try:
        return open_run(path).steps.count() >= load(path / "config.yaml").training.steps
    except ClewError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unless-complete", action="store_true", help="do nothing if the run is there and complete")
    options = parser.parse_args()
    seed = options.seed
    experiment = "addition" if seed == 1 else f"addition-{seed}"
    folder = Path("runs") / experiment
    if options.unless_complete and is_complete(folder / "grpo"):
        print(f"{folder / 'grpo'} is there and complete; `make demo` trains it anew")
        return
    for name in ("material", "sft", "grpo"):  # a demo begins at the beginning; `clew train` would resume
        shutil.rmtree(folder / name, ignore_errors=True)  # no other run there: it is the user's own

    began = time.monotonic()
    right, parameters = make(folder / "material", seed)
    print(
        f"made {folder / 'material'}: a base model of {parameters:,} random parameters, and demonstrations of a "
        f"teacher who forgets carries"
    )
    fields = (f"experiment={experiment}", f"seed={seed}") if seed != 1 else ()
    sft_s = clew("sft", str(HERE / "sft.yaml"), *fields)
    grpo_s = clew("train", str(HERE / "grpo.yaml"), *fields)

    run = open_run(folder / "grpo")
    evaluations = run.evals.read_all()
    exact = [evaluation["pass@1"] for evaluation in evaluations]
    table = Table(title="exact match on 500 held-out problems", title_justify="left")
    for column in ("", "exact match", "seconds"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("the teacher's demonstrations", f"{right:.1%}", "")
    table.add_row("the imitator, after SFT", f"{exact[0]:.1%}", f"{sft_s:.0f}")
    table.add_row(f"after {run.steps.count()} steps of GRPO", f"{exact[-1]:.1%}", f"{grpo_s:.0f}")
    console = Console()
    console.print(table)
    console.print(
        f"learning curve  {sparkline(exact)}  (versions {evaluations[0]['version']} to "
        f"{evaluations[-1]['version']}); as a picture: {run.reports / 'learning_curve.png'}"
    )
    console.print(f"{time.monotonic() - began:.0f} s in all\n")
    console.print("next, try:", style="bold")
    yaml = " ".join([f"{HERE}/grpo.yaml", *fields])
    step = run.steps.data_path(0)
    for command, why in (
        (f"clew status {run.path}", "what each process does and waits for; try it from another terminal"),
        (f"clew show {run.path} 3", "what was trained on at step 3; then a group, an episode, its tokens"),
        (f"clew replay {run.path} --step 3", "train that step again, and compare every stage with the record"),
        (f"clew train {yaml} trial=sync rollout.max_lag=0", "the same, synchronously"),
        (f"clew train {yaml} trial=debug launch.mode=inline training.steps=3", "with breakpoint() anywhere"),
        (f"tensorboard --logdir {folder}", "every metric"),
        (
            f"python -c \"import pandas; print(pandas.read_parquet('{step}')[['id', 'reward', 'data']])\"",
            "what exactly was trained on",
        ),
    ):
        console.print(f"  .venv/bin/{command}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"      {why}", style="dim")
    if not exact[0] < 0.5 < 0.95 < exact[-1]:
        raise SystemExit(f"this run did not show what it should: under 50 % before, over 95 % after (seed {seed})")


if __name__ == "__main__":
    main()
