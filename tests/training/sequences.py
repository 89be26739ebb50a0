"""Recorded sequences and configurations for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from clew.config import Config
from clew.record.rows import Sequence
from clew.training.policy import Policy
from clew.training.tokens import Tokens


def make_sequence(
    name: str,
    *,
    prompt: int = 3,
    response: int = 4,
    reward: float = 0.0,
    seed: int = 0,
    vocab: int = 100,
    logprob: float = -3.0,
    version: int = 0,
    temperature: float = 1.0,
) -> Sequence:
    """Random tokens; `name` is like g0.e1.s0. Its group and episode follow from the name."""
    rng = np.random.default_rng([seed, *name.encode()])
    total = prompt + response
    mask = np.arange(total) >= prompt
    return Sequence(
        id=name,
        group_id=name.split(".")[0],
        episode_id=name.rsplit(".", 1)[0],
        input_ids=rng.integers(6, vocab, total).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(logprob), np.float32(0)),
        versions=np.where(mask, version, -1).astype(np.int32),
        turn_ids=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.where(mask, np.float32(temperature), np.float32(1)),
        reward=reward,
        rewards={"match": reward},
        finish_reason="stop",
    )


def make_batch(*, groups: int = 4, samples: int = 3, seed: int = 0, **options: Any) -> list[Sequence]:
    """Groups of sequences of different lengths and rewards."""
    rng = np.random.default_rng(seed)
    return [
        make_sequence(
            f"g{group}.e{sample}.s0",
            prompt=int(rng.integers(2, 6)),
            response=int(rng.integers(1, 12)),
            reward=float(rng.integers(0, 4)),
            seed=seed,
            **options,
        )
        for group in range(groups)
        for sample in range(samples)
    ]


def score(policy: Policy, sequences: list[Sequence]) -> list[np.ndarray]:
    """Return the policy's current logprobs of the trained tokens, [T] for each sequence."""
    tokens = Tokens.of(sequences)
    return tokens.split(policy.score_all(tokens, policy.plan(tokens)))


def make_config(model: Path | str, *, dtype: str = "float32", **sections: Any) -> Config:
    """A configuration with this model; sections as keywords."""
    sections["model"] = {"path": str(model), "device": "cpu", "dtype": dtype}
    training = {
        "steps": 20,
        "lr": 3e-3,
        "warmup_steps": 2,
        "schedule": "cosine",
        "weight_decay": 0.1,
        "micro_batch_tokens": 60,
    }
    sections["training"] = training | sections.get("training", {})
    sections.setdefault("data", {"path": "unused.jsonl"})
    return Config.model_validate({"experiment": "test", **sections})
