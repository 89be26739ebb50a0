"""Measure packed against padded rows on long-tailed lengths, and logits in chunks against all logits at once."""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench.engine import build_model
from bench.ratios import show
from clew.config import Config
from clew.record.rows import Sequence
from clew.training.engine import TrainEngine
from clew.training.packing import Packed
from clew.training.scoring import MAX_LOGITS, score
from tests.models import tiny_tokenizer
from tests.training.sequences import make_sequence

TOKENS, VOCAB = 4096, 50_000
"""Shape of the logits."""
WARM_UP = 1
"""Rounds that do not count."""


def batch_of(lengths: list[int]) -> list[Sequence]:
    """Return sequences with prompts of 16 tokens and responses of these lengths, in groups of 8."""
    return [
        make_sequence(f"g{i // 8}.e{i % 8}.s0", prompt=16, response=length, reward=float(i % 3), vocab=90)
        for i, length in enumerate(lengths)
    ]


def race(folder: Path, lengths: list[int], rounds: int) -> None:
    """Train on one batch, packed and padded in turns. Print the ratio of forward and backward times, and padding."""
    build_model().save_pretrained(str(folder))
    tiny_tokenizer(folder, chat=False)
    batch = batch_of(lengths)
    engine = TrainEngine(
        Config.model_validate(
            {"experiment": "bench", "model": {"path": str(folder), "device": "cpu"}, "data": {"path": "unused"}}
        )
    )
    assert engine.policy.packs
    seconds: dict[bool, list[float]] = {True: [], False: []}
    padding: dict[bool, float] = {}
    for number in range(rounds + WARM_UP):
        for packs in (True, False):
            engine.policy.packs = packs
            result = engine.train_step(batch)
            padding[packs] = result.metrics["padding_share"]
            if number >= WARM_UP:
                seconds[packs].append(result.timings["forward_backward"])
    ratio = statistics.median(padded / packed for packed, padded in zip(seconds[True], seconds[False], strict=True))
    times = " / ".join(f"{1000 * statistics.median(seconds[packs]):.0f} ms" for packs in (False, True))
    show("padded / packed rows, forward and backward", ratio, ">= 1", times)
    show("padding of packed rows", padding[True], "< 5 %", f"{padding[False]:.1%} of padded ones", percent=True)
    sizes = [len(row.input_ids) for row in batch]
    pairs = sum(rows * length**2 for rows, length in Packed.of(sizes, torch.device("cpu")).shapes)
    show("... and of the pairs within attention", 1 - sum(size**2 for size in sizes) / pairs, percent=True)


def peak(logits: int) -> None:
    """Print the rise of peak memory, in bytes, and the seconds that TOKENS logprobs and their gradient take.

    Args:
        logits: Maximum number of logits that are held at once.
    """
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM(config).eval()

    def compute(rows: int) -> None:
        ids_BT = torch.randint(0, VOCAB, (rows, 129))
        rows_N, columns_N = torch.cartesian_prod(torch.arange(rows), torch.arange(1, 129)).T
        temperatures_N = torch.ones(len(rows_N))
        score(model, ids_BT, rows_N, columns_N, temperatures_N, max_logits=logits).logprobs_N.mean().backward()

    compute(1)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    compute(TOKENS // 128)
    taken = time.perf_counter() - began
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, taken)


def main(rounds: int) -> None:
    """Print the ratios."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(60), 1.0, 128), 4, 1000).astype(int).tolist()
    with tempfile.TemporaryDirectory() as folder:
        race(Path(folder), lengths, rounds)
    found: dict[int, list[tuple[float, float]]] = {2**62: [], MAX_LOGITS: []}
    for _ in range(3):
        for logits, runs in found.items():
            command = [sys.executable, "-m", "bench.packing", "--peak", str(logits)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            runs.append((float(output[0]), float(output[1])))
    whole, chunked = ([statistics.median(each) for each in zip(*runs, strict=True)] for runs in found.values())
    what = f"{TOKENS:,} tokens x {VOCAB:,}"
    mib = f"{whole[0] / 2**20:,.0f} / {chunked[0] / 2**20:,.0f} MiB"
    show(f"peak memory, all logits at once / in chunks, {what}", whole[0] / chunked[0], ">= 2", mib)
    show("seconds, in chunks / all at once", chunked[1] / whole[1], "", f"{chunked[1]:.1f} / {whole[1]:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--peak", type=int, help="only how much memory this many logits at a time take")
    arguments = parser.parse_args()
    if arguments.peak is None:
        main(arguments.rounds)
    else:
        peak(arguments.peak)
