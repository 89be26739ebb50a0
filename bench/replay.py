"""The time machine's figures: size on disk, replay against bare training, and what its commands take from the shell."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.ratios import show
from bench.step import prepare
from clew.config import load
from clew.record import rows
from clew.record.batch_digest import digest_rows
from clew.record.rows import Sequence
from clew.record.run import RunDirectory

STEPS = 16
LONG_STEPS, GROUPS, SAMPLES = 10_000, 100, 1


def shell(*arguments: str) -> float:
    """Seconds of Python with these arguments, its start included; the median of three."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def recorded(folder: Path) -> RunDirectory:
    """A run of the model and prompts of bench/step.py, with steps of half a second."""
    from clew.loop.trainer_process import learn_inline

    prepare(folder)
    options = [f"training.steps={STEPS}", "rollout.batch_groups=32", "checkpoint.every_steps=100"]
    config = load(folder / "step-64.yaml", options)
    learn_inline(config, lambda step, summary: None)
    return RunDirectory(config.run_path)


def size(run: RunDirectory, folder: Path) -> float:
    """A step's files over a torch.save of the same tensors."""
    from clew.training.padded import save_padded

    batch, stages = run.steps.read_data(2), run.steps.read_stages(2).arrays
    by_row = {name: [arrays[row.id] for row in batch] for name, arrays in stages.items()}
    save_padded(folder / "step.pt", batch, by_row)
    files = (run.steps.data_path(2), run.steps.json_path(2), run.steps.stage_path(2, 0))
    return sum(path.stat().st_size for path in files) / (folder / "step.pt").stat().st_size


def speed(run: RunDirectory) -> tuple[float, float]:
    """Bare training over replay, which take turns: the median of the steps; and seconds of a bare step."""
    from clew.loop.replay import engine_at, replay

    engine = engine_at(run, 0)
    batches = [run.steps.read_data(step) for step in range(STEPS)]
    steps = replay(run, engine_at(run, 0), STEPS - 1)
    bare, replayed = [], []
    for batch in batches:
        began = time.perf_counter()
        engine.train_step(batch)
        bare.append(time.perf_counter() - began)
        began = time.perf_counter()
        assert not next(steps).differences
        replayed.append(time.perf_counter() - began)
    ratios = [one / other for one, other in zip(bare[1:], replayed[1:], strict=True)]
    return statistics.median(ratios), statistics.median(bare[1:])


def a_sequence(group: int, sample: int, tokens: int) -> Sequence:
    """Random tokens, the first 24 of them a prompt."""
    rng = np.random.default_rng(group * 1000 + sample)
    mask = np.arange(tokens) >= 24
    name = f"g{group:06d}.e{sample}"
    return Sequence(
        id=f"{name}.s0",
        group_id=f"g{group:06d}",
        episode_id=name,
        input_ids=rng.integers(2, 1000, tokens).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, rng.normal(-2, 1, tokens), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turn_ids=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.ones(tokens, np.float32),
        reward=float(rng.random()),
    )


def commit(run: RunDirectory, step: int, batch: list[Sequence], like: dict[str, Any]) -> None:
    """Commit a step with stages that follow from its data. like: JSON of a real step, for all other fields."""
    from clew.algorithms import grpo
    from clew.algorithms.losses import TrainedTokens
    from clew.config import Algorithm, Training
    from clew.training.loss_function import loss_function

    each = grpo.advantages(batch)
    advantages = [np.where(row.loss_mask, each[i], np.float32(0)) for i, row in enumerate(batch)]
    logprobs = [row.logprobs for row in batch]
    loss = []
    for row, advantage in zip(batch, advantages, strict=True):
        behaviour, its = torch.from_numpy(row.logprobs), torch.from_numpy(advantage)
        tokens = TrainedTokens(logprobs_N=behaviour, proximal_N=behaviour, behaviour_N=behaviour, advantages_N=its)
        per_token = loss_function(Algorithm())(tokens).per_token_N.numpy()
        loss.append(np.where(row.loss_mask, per_token, np.float32(0)))
    stages = {"advantages": advantages, "proximal_logprobs": logprobs, "logprobs": logprobs, "loss": loss}
    groups = sorted({row.group_id for row in batch})
    sections = {"training": Training().model_dump(mode="json"), "algorithm": Algorithm().model_dump(mode="json")}
    plan = [[list(range(len(batch)))]]
    summary = {**summary_of(step, groups, like), "config": sections, "plan": plan}
    run.steps.write_data(step, rows.to_table(batch))
    run.steps.write_stages(step, 0, digest_rows(batch), stages)
    run.steps.commit(step, summary)


def long_record(folder: Path, like: dict[str, Any]) -> RunDirectory:
    """Make 10,000 steps of 100 groups: a million sequences in the index; a step's data every thousand steps.

    Args:
        folder: The folder for the run.
        like: JSON of a real step, which the steps repeat except for what names them.
    """
    run = RunDirectory(folder / "runs" / "long" / "0")
    for step in range(LONG_STEPS):
        first = step * GROUPS
        if step % 1000 == 137:
            batch = [a_sequence(first + group, sample, 500) for group in range(GROUPS) for sample in (0, 1)]
            commit(run, step, batch, like)
        else:
            run.steps.commit(step, summary_of(step, [f"g{group:06d}" for group in range(first, first + GROUPS)], like))
    return run


def summary_of(step: int, groups: list[str], like: dict[str, Any]) -> dict[str, Any]:
    """Return what step-N.json says of a step that nothing trained; other fields are those of a real step."""
    digest = f"{step:016x}"
    digests = {"data": digest, "gradients": [digest], "weights": digest}
    known = {name: value for name, value in like.items() if name not in ("clew_format", "step", "chain")}
    return {**known, "groups": groups, "versions": [step, step], "digests": digests}


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = recorded(folder)
        show("a step's files / the same in torch.save", size(run, folder), "<= 0.5")
        ratio, seconds = speed(run)
        show("replay's speed / bare training's", ratio, ">= 0.95", f"a step of {1000 * seconds:.0f} ms")
        for what in ("torch", "torch, transformers"):
            print(f"  import {what}: {shell('-c', f'import {what}'):.2f} s")
        took = shell("-m", "clew", "replay", str(run.path), "--step", "0")
        print(f"  clew replay --step 0, from the shell: {took:.2f} s (limit <= 3 s)")
        wide = RunDirectory(folder / "runs" / "wide" / "0")
        like = run.steps.read(STEPS - 1)
        commit(wide, 0, [a_sequence(group, sample, 1024) for group in range(16) for sample in range(8)], like)
        took = shell("-m", "clew", "replay", str(wide.path), "--step", "0", "--stage", "loss")
        print(f"  clew replay --stage loss, 128 x 1,024 tokens, from the shell: {took:.2f} s (limit <= 2.5 s)")
        long = long_record(folder, like)
        for what in ([], ["1137"], ["g113705"]):
            took = shell("-m", "clew", "show", str(long.path), *what)
            limit = "1 s" if what else "1.5 s"  # with the health check
            print(f"  clew show RUN {' '.join(what):<8} of 10,000 steps: {took:.2f} s (limit <= {limit})", flush=True)


if __name__ == "__main__":
    main()
