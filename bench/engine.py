"""The embedded engine against transformers' `generate` and a bare cached loop; and HTTP against the engine directly.

Ratios of tokens a second, each the median over rounds in which the contestants take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, Qwen2Config

from clew.http_server import new_event_loop
from clew.inference.client import HTTPEngine
from clew.inference.embedded import EmbeddedEngine
from clew.inference.engine_core import Core
from clew.inference.protocol import GenerateRequest, SamplingParams

VOCAB = 128


def build_model(
    hidden: int = 96, layers: int = 4, intermediate: int = 200, heads: int = 4, vocab: int = VOCAB, context: int = 1024
) -> Any:
    """Return a Qwen2 model with random weights. The default sizes give 0.36 M parameters."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config).eval()


Work = list[tuple[list[int], int]]
"""Prompts, and how many tokens to generate for each."""


def fixed(prompts: int, tokens: int) -> Work:
    """Prompts of 16 tokens that all get the same number of new ones."""
    rng = random.Random(0)
    return [([rng.randrange(2, VOCAB) for _ in range(16)], tokens) for _ in range(prompts)]


def varied(requests: int) -> Work:
    """Prompts of 4 to 32 tokens; lengths with a long tail, 4 to 256."""
    rng = random.Random(0)
    return [
        (
            [rng.randrange(2, VOCAB) for _ in range(rng.randint(4, 32))],
            min(256, max(4, round(rng.lognormvariate(3.5, 1.0)))),
        )
        for _ in range(requests)
    ]


def with_generate(model: Any, work: Work, batch: int) -> None:
    """transformers' generate, a batch at a time, each until its longest is done."""
    for begin in range(0, len(work), batch):
        part = work[begin : begin + batch]
        width = max(len(prompt) for prompt, _ in part)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in part]).to(model.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in part]).to(model.device)
        longest = max(tokens for _, tokens in part)
        settings = GenerationConfig(
            max_new_tokens=longest, min_new_tokens=longest, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None
        )
        model.generate(ids, attention_mask=mask, generation_config=settings)


@torch.inference_mode()
def with_bare_loop(model: Any, work: Work) -> None:
    """Generate as one writes it by hand, for prompts of one length: forward, softmax, draw, keep the logprob."""
    ids = torch.tensor([prompt for prompt, _ in work])
    cache = DynamicCache(config=model.config)
    for _ in range(work[0][1]):
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        logprobs = torch.log_softmax(logits, -1)
        ids = torch.multinomial(logprobs.exp(), 1)
        logprobs.gather(1, ids)


def with_engine(engine: Core, work: Work) -> None:
    """The embedded engine, driven directly."""
    for index, (prompt, tokens) in enumerate(work):
        params = SamplingParams(max_new_tokens=tokens, stop_token_ids=(), seed=index)
        engine.submit(GenerateRequest(id=str(index), input_ids=prompt, params=params))
    while engine.has_work:
        engine.step()


class Served:
    """Server of a model in a process of its own: the function behind `clew serve`, and a client of it."""

    def __init__(self, model: Any, folder: Path, max_running: int) -> None:
        from tests.models import tiny_tokenizer

        model.save_pretrained(str(folder / "model"))
        tiny_tokenizer(folder / "model")
        (folder / "config.yaml").write_text(
            json.dumps(
                {
                    "experiment": "bench",
                    "root": str(folder / "runs"),
                    "model": {"path": str(folder / "model")},
                    "data": {"path": "none"},
                    "inference": {"listen": "127.0.0.1:0", "max_running": max_running},
                }
            )
        )
        code = "import sys; from clew.config import load; from clew.inference.serve import serve; "
        self.process = subprocess.Popen(
            [sys.executable, "-c", code + "serve(load(sys.argv[1]))", str(folder / "config.yaml")],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip().rpartition("=")[2]
        self.runner = asyncio.Runner(loop_factory=new_event_loop)
        self.engine = HTTPEngine(self.address)

    def run(self, work: Work) -> None:
        """Send all requests at once, a connection each."""
        self.runner.run(self._run(work))

    async def _run(self, work: Work) -> None:
        await asyncio.gather(
            *(
                self.engine.generate(
                    GenerateRequest(prompt, SamplingParams(max_new_tokens=tokens, stop_token_ids=(), seed=index))
                )
                for index, (prompt, tokens) in enumerate(work)
            )
        )

    def close(self) -> None:
        """End the server."""
        self.runner.run(self.engine.close())
        self.process.terminate()
        self.process.wait()


def race(contestants: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each contestant. They take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 1):  # the first round warms up, and does not count
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def show(name: str, ratio: float, limit: float | None, tokens_per_s: float) -> None:
    """One line: the ratio, its limit, and the engine's tokens a second."""
    limited = f"(limit >= {limit:g})" if limit else ""
    print(f"{name:<44} {ratio:6.2f}x  {limited:<15} {tokens_per_s:8.0f} tokens/s", flush=True)


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    plain, in_engine = build_model(), build_model()  # the engine replaces the attention of the model that it is given
    for rows in (32, 128):
        work = fixed(rows, 64)
        engine = EmbeddedEngine(in_engine, None, max_running=rows)
        times = race(
            {
                "generate": lambda work=work, rows=rows: with_generate(plain, work, rows),
                "bare": lambda work=work: with_bare_loop(plain, work),
                "engine": lambda engine=engine, work=work: with_engine(engine, work),
            },
            rounds,
        )
        rate = rows * 64 / times["engine"]
        show(f"engine vs generate, fixed length, {rows} rows", times["generate"] / times["engine"], 1.2, rate)
        show(f"engine vs bare loop, fixed length, {rows} rows", times["bare"] / times["engine"], None, rate)
    work = varied(256)
    engine = EmbeddedEngine(in_engine, None, max_running=32)
    times = race(
        {
            "generate": lambda: with_generate(plain, work, 32),
            "engine": lambda engine=engine, work=work: with_engine(engine, work),
        },
        max(3, rounds // 2),
    )
    rate = sum(tokens for _, tokens in work) / times["engine"]
    show("engine vs generate, 256 varied requests", times["generate"] / times["engine"], 2.5, rate)
    with tempfile.TemporaryDirectory() as folder:
        served_engine = Served(build_model(), Path(folder), 32)
        for name, work in (("256 varied requests", varied(256)), ("fixed length, 32 rows", fixed(32, 64))):
            times = race(
                {
                    "direct": lambda engine=engine, work=work: with_engine(engine, work),
                    "http": lambda work=work: served_engine.run(work),
                },
                rounds,
            )
            rate = sum(tokens for _, tokens in work) / times["http"]
            show(f"HTTP vs direct, {name}", times["direct"] / times["http"], 0.9, rate)
        served_engine.close()


if __name__ == "__main__":
    main()
