"""One trainer rank with two threads against two ranks with one thread each (FSDP2 over gloo): the same train steps.

Rows of 32 to 256 tokens, a Qwen2 of 9 million parameters, float32. The contestants take turns; the ratio is the median
of the rounds' ratios.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.ratios import show
from clew.launch.ranks import rank_variables
from clew.processes import die_with_parent, free_port

ROUNDS, WARM_UP = 7, 2
GROUPS, SAMPLES = 16, 4
THREADS = 2


def prepare(folder: Path) -> None:
    """The model and its tokenizer."""
    from tests.models import tiny_model, tiny_tokenizer

    tiny_tokenizer(folder)
    tiny_model(folder, hidden=256, layers=12, context=512, scale=0.02)


def batch() -> list[Any]:
    """Recorded sequences with random tokens and rewards, most of them short."""
    from clew.record.rows import Sequence

    rng = np.random.default_rng(0)
    made = []
    for name in [f"g{group:06d}.e{sample}" for group in range(GROUPS) for sample in range(SAMPLES)]:
        length = int(np.clip(rng.exponential(64) + 32, 32, 256))
        mask = np.arange(length) >= 16
        made.append(
            Sequence(
                id=f"{name}.s0",
                group_id=name.partition(".")[0],
                episode_id=name,
                input_ids=rng.integers(6, 90, length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, np.float32(-4.5), np.float32(0)),
                versions=np.where(mask, 0, -1).astype(np.int32),
                turn_ids=np.where(mask, 0, -1).astype(np.int32),
                temperatures=np.ones(length, np.float32),
                reward=float(rng.random()),
                rewards={},
                finish_reason="stop",
            )
        )
    return made


def work(model: str, threads: int) -> None:
    """One rank: a step for each line of input; answers with its seconds and this process's peak memory in MB."""
    import torch

    from clew.config import Config
    from clew.training.engine import TrainEngine
    from clew.training.ranks import Ranks

    torch.set_num_threads(threads)
    config = Config.model_validate(
        {"experiment": "bench", "model": {"path": model, "device": "cpu"}, "data": {"path": "unused"}}
    )
    rows = batch()
    with Ranks.joined() as ranks:
        engine = TrainEngine(config, ranks=ranks)
        for _ in sys.stdin:
            began = time.perf_counter()
            engine.train_step(rows)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            print(time.perf_counter() - began, peak, flush=True)


class Trainer:
    """Some ranks, which take a step when they are told to."""

    def __init__(self, model: Path, ranks: int, module: str = "bench.ranks", path: str = "") -> None:
        """module: what each of them runs; path: where it finds what else it imports."""
        port = free_port()
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(model), str(THREADS // ranks)],
                env={**os.environ, **rank_variables(rank, ranks, port), "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def step(self) -> tuple[float, float]:
        """Seconds of the slowest rank, peak memory (MB) of the largest."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        answers = [rank.stdout.readline().split() for rank in self._ranks if rank.stdout is not None]
        return max(float(each[0]) for each in answers), max(float(each[1]) for each in answers)

    def close(self) -> None:
        for rank in self._ranks:
            with rank:
                rank.kill()


def main() -> None:
    """Print the ratio."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        one, two = (Trainer(Path(folder), ranks) for ranks in (1, 2))
        rounds = [(one.step(), two.step()) for _ in range(WARM_UP + ROUNDS)][WARM_UP:]
        one.close()
        two.close()
    seconds = [statistics.median(each[place][0] for each in rounds) for place in (0, 1)]
    memory = [max(each[place][1] for each in rounds) for place in (0, 1)]
    ratio = statistics.median(alone[0] / several[0] for alone, several in rounds)
    detail = f"{1e3 * seconds[0]:.0f} and {1e3 * seconds[1]:.0f} ms; {memory[0]:.0f} and {memory[1]:.0f} MB a process"
    show("two ranks of one thread / one rank of two threads", ratio, ">= 0.85", detail)


if __name__ == "__main__":
    die_with_parent()
    if len(sys.argv) > 1:
        work(sys.argv[1], int(sys.argv[2]))
    else:
        main()
