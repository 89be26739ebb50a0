"""`clew eval` on the demo's model and 500 problems, from the shell, against the engine alone, from the shell, too.

The bare program starts Python, loads the same model into the same engine, tokenizes all prompts at once, completes
them side by side and compares the answers: no episodes, no reward processes, no configuration. The two take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.ratios import show

ROUNDS = 5
MAX_NEW_TOKENS, MAX_RUNNING = 6, 512
"""Settings of examples/addition/grpo.yaml."""


def bare(model: Path, data: Path) -> None:
    """Evaluate with the engine alone; print the seconds that it generated."""
    from clew.inference.embedded import build_engine
    from clew.inference.protocol import GenerateRequest, SamplingParams
    from clew.models.loading import load_model, load_tokenizer, pick_device

    rows = [json.loads(line) for line in data.read_text().splitlines()]
    tokenizer = load_tokenizer(str(model))
    engine = build_engine(load_model(str(model), "float32", pick_device("auto")), tokenizer, max_running=MAX_RUNNING)
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0)
    ids = tokenizer([row["prompt"] for row in rows])["input_ids"]
    row_of = {}
    right = 0
    began = time.perf_counter()
    for row, prompt in zip(rows, ids, strict=True):
        request = GenerateRequest(prompt, params)
        row_of[request] = row
        engine.submit(request)
    while engine.has_work:
        for request, completion in engine.step():
            text = tokenizer.decode(completion.output_ids, skip_special_tokens=True)
            right += text == row_of[request]["answer"]
    print(json.dumps({"right": right, "seconds": time.perf_counter() - began}))


def timed(*command: str) -> tuple[float, float, str]:
    """Return the seconds, the CPU seconds and the output of a Python process and of those that it started."""
    began, before = time.perf_counter(), os.times()
    environment = {"GOMP_SPINCOUNT": "1000", **os.environ}  # as under every command of Clew
    ended = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True, env=environment)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - began, used, ended.stdout


def main() -> None:
    """Print the ratio, or be the bare program."""
    if sys.argv[1:]:
        bare(*map(Path, sys.argv[1:]))
        return
    from examples.addition.make import make

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, 1)
        model, data = folder / "base", folder / "held_out.jsonl"
        reward = ("--reward", "examples.addition.reward.exact_match")
        sampling = (f"sampling.max_new_tokens={MAX_NEW_TOKENS}", f"inference.max_running={MAX_RUNNING}")
        command = ("-m", "clew", "eval", str(model), *sampling, "--data", str(data), *reward)
        whole, alone, engine = [], [], []
        for _ in range(ROUNDS):
            whole.append(timed(*command)[:2])
            *seconds, output = timed("-m", "bench.evaluate", str(model), str(data))
            alone.append(seconds)
            engine.append(json.loads(output)["seconds"])
        for place, of in enumerate(("", "CPU time of ")):  # other work on the machine spoils CPU time less
            took, needed = ([pair[place] for pair in pairs] for pairs in (whole, alone))
            ratio = statistics.median(one / other for one, other in zip(took, needed, strict=True))
            detail = f"{statistics.median(took):.1f} s and {statistics.median(needed):.1f} s"
            show(f"{of}clew eval / its engine alone, start-up included", ratio, "" if of else "<= 1.2", detail)
        print(f"  the engine alone generates for {statistics.median(engine):.2f} s of it")


if __name__ == "__main__":
    main()
