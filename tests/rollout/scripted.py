"""A scripted engine with the real engines' protocol, and a runner that writes into a run directory."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from clew.config import Config
from clew.inference.protocol import Completion, GenerateRequest, SamplingParams
from clew.record.run import RunDirectory
from clew.rollout.runner import RolloutRunner
from tests.models import tiny_tokenizer

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(12)]


class Scripted:
    """Engine that draws answers from the request's seed, labelled with the version `now`, after `turns` turns of the
    event loop. It aborts every `abort_every`-th request after one token."""

    def __init__(self, *, turns: int = 3, delay_s: float = 0.0, abort_every: int = 0) -> None:
        self.now = 0
        self.turns, self.delay_s, self.abort_every = turns, delay_s, abort_every
        self.requests: list[tuple[str, list[int], SamplingParams]] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        params = request.params
        self.requests.append((request.id, list(request.input_ids), params))
        number = len(self.requests)
        for _ in range(self.turns):
            await asyncio.sleep(0)
        if self.delay_s:
            await asyncio.sleep(self.delay_s * random.Random(params.seed).random())
        draw = random.Random(params.seed)
        count = draw.randint(1, max(1, params.max_new_tokens))
        cut = self.abort_every and number % self.abort_every == 0 and count > 1
        output = [draw.randrange(6, 16) for _ in range(1 if cut else count)]
        return Completion(
            output_ids=output,
            logprobs=[-0.5] * len(output),
            versions=[self.now] * len(output),
            finish_reason="abort" if cut else "stop",
        )

    async def version(self) -> int:
        return self.now


def config_for(tmp_path: Path, **sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "experiment": "test",
        "root": str(tmp_path),
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": "rows.jsonl"},
        "rollout": {"reward": "tests.rollout.user_code.exact", "n_samples": 2, "batch_groups": 3},
        "sampling": {"max_new_tokens": 6},
        "training": {"steps": 4},
        "launch": {"mode": "inline"},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return Config.model_validate(values)


def runner_for(
    tmp_path: Path, config: Config, engine: Any, *, rows: list[dict] = ROWS, eval_rows: list[dict] | None = None
) -> RolloutRunner:
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    return RolloutRunner(config, RunDirectory(config.run_path), engine, tokenizer, rows, eval_rows or [])
