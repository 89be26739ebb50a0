"""A train step of AReaL 1.0.4 (`FSDPEngine.train_batch`) against Clew's, on the CPU: the same batch and model as in
`bench.ranks`, one process of two threads each, taking turns.

AReaL computes forward and backward passes with a clipped ratio, and AdamW. Clew's step has advantages, digests of
gradients and weights, and the stages for the record besides. AReaL packs rows for a varlen kernel; sdpa, which is what
a CPU has, attends over the whole of a packed row: it computes more pairs, and its numbers are not those of the rows
alone. So its micro-batches are smaller than Clew's 4,096 tokens. Its requirements name other versions of torch and
transformers; `make bench` installs what it imports without dependencies (bench/areal.txt), beside everything else.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.ranks import ROUNDS, THREADS, WARM_UP, Trainer, batch, prepare
from bench.ratios import show
from clew.processes import die_with_parent

TOKENS = 1024
"""Tokens of AReaL's micro-batches."""
INSTALLED = Path(sys.prefix) / "areal"


def work(model: str) -> None:
    """AReaL's engine: a step for each line of input; answers as `bench.ranks.work` does."""
    import logging
    import resource
    import warnings

    logging.disable(logging.INFO)  # it tells of every micro-batch
    warnings.filterwarnings("ignore")
    import torch
    from areal.api.cli_args import MicroBatchSpec, OptimizerConfig, TrainEngineConfig  # pyright: ignore
    from areal.api.io_struct import FinetuneSpec  # pyright: ignore
    from areal.engine.fsdp_engine import FSDPEngine  # pyright: ignore

    torch.set_num_threads(THREADS)
    engine = FSDPEngine(
        TrainEngineConfig(
            experiment_name="bench",
            trial_name="areal",
            path=model,
            backend="fsdp:d1",
            attn_impl="sdpa",
            dtype="float32",
            mb_spec=MicroBatchSpec(max_tokens_per_mb=TOKENS),
            optimizer=OptimizerConfig(lr=1e-6, gradient_clipping=1.0),
        )
    )
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=1000, train_batch_size=1))
    padded = _padded()
    for _ in sys.stdin:
        began = time.perf_counter()
        engine.train_batch(dict(padded), _clipped, lambda each: each["loss_mask"].count_nonzero())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        os.write(answers, f"{time.perf_counter() - began} {peak}\n".encode())


def _padded() -> dict[str, Any]:
    """The batch as AReaL takes it; advantages are the rewards."""
    from clew.training.padded import padded

    tensors = padded(batch())
    tensors["advantages"] = tensors["rewards"][:, None].float() * tensors["loss_mask"]
    return {name: tensors[name] for name in ("input_ids", "attention_mask", "loss_mask", "logprobs", "advantages")}


def _clipped(logprobs: Any, entropy: Any, given: dict[str, Any], **_: Any) -> Any:
    """PPO's loss: the mean over the trained tokens. A packed row's logprob i is of the token after i."""
    import torch

    mask, behaviour, advantages = (given[name].roll(-1) for name in ("loss_mask", "logprobs", "advantages"))
    ratio = torch.where(mask.bool(), logprobs - behaviour, 0).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(objective * mask).sum() / mask.count_nonzero()


def main() -> None:
    """Print the ratio."""
    if not (INSTALLED / "areal").is_dir():
        print(f"AReaL is not installed: pip install --no-deps --target {INSTALLED} -r bench/areal.txt")
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        ours = Trainer(Path(folder), 1)
        theirs = Trainer(Path(folder), 1, module="bench.areal", path=str(INSTALLED))
        rounds = [(ours.step(), theirs.step()) for _ in range(WARM_UP + ROUNDS)][WARM_UP:]
        ours.close()
        theirs.close()
    seconds = [statistics.median(each[place][0] for each in rounds) for place in (0, 1)]
    ratio = statistics.median(areal[0] / clew[0] for clew, areal in rounds)
    show("AReaL's train_batch / Clew's train step", ratio, "", f"{1e3 * seconds[1]:.0f} / {1e3 * seconds[0]:.0f} ms")


if __name__ == "__main__":
    die_with_parent()
    if len(sys.argv) > 1:
        answers = os.dup(1)
        os.dup2(2, 1)  # AReaL's log goes to the terminal, not between the answers
        work(sys.argv[1])
    else:
        main()
