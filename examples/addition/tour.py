"""The tour: five faults planted into runs of the demo, and for each the one command that finds it.

make tour                                 the demo first, then the tour
python -m examples.addition.tour          the tour alone, after `make demo`
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.console import Console

from clew.record import rows
from clew.record.run import RunDirectory

console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
STEP = 3


def clew(*arguments: str) -> str:
    """Run a command of Clew as one would type it; show and return what it printed."""
    console.print(f"$ clew {' '.join(arguments)}", style="bold", soft_wrap=True, markup=False)
    shown = ""
    command = [sys.executable, "-m", "clew", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            shown += line
            console.print(f"  {line.rstrip()}", markup=False, soft_wrap=True)
    console.print(f"  (exit code {process.returncode})\n", style="dim")
    return shown


def altered_advantage(run: RunDirectory) -> None:
    """Add 0.5 to the advantage of one token."""
    path = run.steps.stage_path(STEP, 0)
    table = rows.read_table(path)
    row = 17
    position = int(np.flatnonzero(run.steps.read_data(STEP)[row].loss_mask)[1])
    values = table.column("advantages").to_pylist()
    values[row][position] += 0.5
    place = table.schema.get_field_index("advantages")
    changed = pa.array(values, pa.list_(pa.float32()))
    rows.write_table(path, table.set_column(place, table.schema.field("advantages"), changed))
    expected = f"step {STEP}, advantages: {table.column('id')[row].as_py()}, token {position}"
    assert expected in clew("replay", str(run.path), "--step", str(STEP))


def new_bug_in_the_reward(run: RunDirectory) -> None:
    """The reward function now compares the lengths of answers alone."""
    text = run.config_path.read_text()
    run.config_path.write_text(text.replace("addition.reward.exact_match", "addition.tour.equal_length"))
    shown = clew("replay", str(run.path), "--reward", "--step", str(STEP))
    assert "differ from what examples.addition.tour.equal_length returns now" in shown


def equal_length(completion: str, data: dict) -> float:
    """The demo's reward, with a bug."""
    return float(len(completion) == len(data["answer"]))


def poisoned_sequence(run: RunDirectory) -> None:
    """One response becomes a long loop of a wrong token, with logprobs that its engine cannot have meant."""
    batch = run.steps.read_data(STEP)
    row = next(each for each in batch if each.reward == 0)

    def loop(name: str) -> np.ndarray:
        values = getattr(row, name)
        return np.concatenate([values[:-1], np.repeat(values[-2:-1], 24)])

    poisoned = dataclasses.replace(row, **{name: loop(name) for name in rows.ALIGNED})
    poisoned.logprobs[poisoned.loss_mask] = -20.0
    run.steps.write_data(STEP, rows.to_table([poisoned if each is row else each for each in batch]))
    shown = clew("blame", str(run.path), "--step", str(STEP), "--top", "3", "--tokens", "4")
    table = shown[shown.index("\nsequence ") :].splitlines()[2:]  # below its heading
    assert table[0].startswith(row.id), shown


def another_learning_rate(run: RunDirectory) -> None:
    """Train on the same data with a tenth of the learning rate, as a colleague did."""
    trial = f"{run.path.name}-colleague"
    shutil.rmtree(run.path.parent / trial, ignore_errors=True)
    clew("replay", str(run.path), "--steps", f"{STEP}:{STEP + 2}", "training.lr=4e-5", f"trial={trial}")
    expected = "training.lr: 0.0004 → 4e-05"
    assert expected in clew("diff", str(run.path), str(run.path.parent / trial))


def truncated_step_file(run: RunDirectory) -> None:
    """A copy over a bad network left the last bytes out."""
    path = run.steps.data_path(STEP)
    path.write_bytes(path.read_bytes()[:-100])
    expected = f"{path} cannot be read"
    assert expected in clew("replay", str(run.path), "--step", str(STEP))


FAULTS: dict[str, Callable[[RunDirectory], None]] = {
    "An advantage was altered in the record": altered_advantage,
    "The reward function has a new bug": new_bug_in_the_reward,
    "One poisoned sequence spikes the gradient": poisoned_sequence,
    "A colleague's run differs, and nobody remembers why": another_learning_rate,
    "A step file is truncated": truncated_step_file,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/addition/grpo"), help="a run of the demo")
    run = parser.parse_args().run
    if not (run / "steps" / f"step-{STEP + 1:06d}.json").exists():
        raise SystemExit(f"{run} has no {STEP + 2} steps: run `make demo` first.")
    copies = f"{run.parent / 'tour-1'} to tour-{len(FAULTS)}"
    console.print(f"Five faults in copies of {run} ({copies}), each found by one command.", soft_wrap=True)
    for number, (title, plant) in enumerate(FAULTS.items(), 1):
        console.rule(f"{number}. {title}", align="left")
        console.print(f"planted: {plant.__doc__}\n", style="dim")
        trial = run.parent / f"tour-{number}"
        shutil.rmtree(trial, ignore_errors=True)
        shutil.copytree(run, trial, symlinks=True)
        plant(RunDirectory(trial))
    console.print("Five faults, each found by one command. The copies are in", str(run.parent / "tour-*"))


if __name__ == "__main__":
    main()
