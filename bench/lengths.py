"""Clew's step against TRL's where lengths vary widely: synchronous, and with max_lag 1.

16 prompts x 8 samples, at most 512 new tokens. The model is random, and one token in 128 ends an answer: a quarter of
the longest on average. A synchronous step is measured in turns with TRL's; the asynchronous run, `clew train` with its
three processes, comes after it, and then TRL once more.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from bench.asynchrony import LEFT_OUT, span, train
from bench.ratios import show
from bench.step import Trl, parts, prepare, race
from clew.record.run import RunDirectory

TOKENS = 512

YAML = """\
experiment: bench
root: {folder}/runs
model: {{path: {folder}/model}}
data: {{path: {folder}/prompts.jsonl}}
rollout: {{reward: bench.rewards.digits, batch_groups: 16, n_samples: 8, max_lag: 0}}
sampling: {{max_new_tokens: 512, stop_token_ids: [1]}}
training: {{steps: {steps}, lr: 1e-5}}
checkpoint: {{every_steps: 1000}}
launch: {{threads: {threads}, mode: {mode}}}
"""


def main(rounds: int = 4, steps: int = 12) -> None:
    """Print the ratios."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        inline, apart = folder / "inline.yaml", folder / "apart.yaml"
        inline.write_text(YAML.format(folder=folder, steps=1, threads=2, mode="inline"))
        apart.write_text(YAML.format(folder=folder, steps=steps, threads=1, mode="local"))
        trl = Trl(folder, gradient_checkpointing=True, tokens=TOKENS, at_least=None)
        lean = Trl(folder, gradient_checkpointing=False, tokens=TOKENS, at_least=None)
        seen = race(inline, {"trl": trl, "trl, lean": lean}, rounds)
        committed, timings = train(apart, 1, "apart", {})
        trl_s, lean_s = ([*seen.seconds[name], again()] for name, again in (("trl", trl), ("trl, lean", lean)))
        run = RunDirectory(folder / "runs" / "bench" / "apart")
        lengths = [int(row.loss_mask.sum()) for step in range(run.steps.count()) for row in run.steps.read_data(step)]
    mean, longest = statistics.mean(lengths), max(lengths)
    print(f"  lengths: mean {mean:.0f}, longest {longest}; {len(lengths)} sequences of the asynchronous run")
    for who, how, times in (("trl", "as it comes", trl_s), ("trl, lean", "no checkpointing", lean_s)):
        show(f"TRL's step ({how}) / synchronous step", seen.ratio(who, "clew"), ">= 2", seen.times(who, "clew"))
        taken = span(committed)
        detail = f"{1000 * statistics.median(times):.0f} ms / {1000 * taken:.0f} ms"
        show(f"TRL's step ({how}) / step with max_lag 1", statistics.median(times) / taken, ">= 3", detail)
    print(f"  the synchronous step, ms: {parts(seen.timings)}")
    print(f"  the step with max_lag 1, ms: {parts(timings[LEFT_OUT:])}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.steps)
