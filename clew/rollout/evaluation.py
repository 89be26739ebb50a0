"""Evaluation on held-out prompts: when it is due, and the numbers that it reports."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceABC
from typing import Any

import numpy as np

from clew.config import Config
from clew.rollout.episode import Episode

PASS_ABOVE = 0.5
"""Threshold of the total reward above which an episode passes.

0/1 rewards count as they are, and a small deduction from 1 (for length, say) still passes.
"""


def is_due(version: int, config: Config) -> bool:
    """Return whether the weights of `version` are to be evaluated: versions 0, N, 2N, ... and the last are."""
    if config.eval.path is None:
        return False
    return version % config.eval.every_steps == 0 or version == config.training.steps


def group_id(version: int, row: int) -> str:
    """Return the group ID of an evaluation prompt, such as v000020.g000003, which no training group has."""
    return f"v{version:06d}.g{row:06d}"


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the chance that at least one of k samples passes, given that `passed` of n did.

    Chen et al. 2021 (arXiv 2107.03374), eq. 1: 1 - C(n - passed, k) / C(n, k). Needs k <= n.
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def summarize(prompts: SequenceABC[SequenceABC[Episode]], *, n_samples: int, seconds: float) -> dict[str, Any]:
    """Return the summary of an evaluation. Failed episodes are counted in `failed` and nowhere else.

    It has pass@k for k = 1, 2, 4, ... up to n_samples, each over the prompts of which at least k episodes did not fail.
    """
    scored = [[episode for episode in episodes if episode.error is None] for episodes in prompts]
    flat = [episode for episodes in scored for episode in episodes]
    summary: dict[str, Any] = {}
    k = 1
    while k <= n_samples:
        estimates = [
            pass_at_k(len(episodes), sum(episode.reward > PASS_ABOVE for episode in episodes), k)
            for episodes in scored
            if len(episodes) >= k
        ]
        summary[f"pass@{k}"] = _mean(estimates)
        k *= 2
    names = sorted({name for episode in flat for name in episode.sequences[0].rewards})
    summary |= {
        "reward": _mean([episode.reward for episode in flat]),
        "rewards": {
            name: _mean([e.sequences[0].rewards[name] for e in flat if name in e.sequences[0].rewards])
            for name in names
        },
        "length": _mean([episode.tokens for episode in flat]),
        "truncated": _mean([episode.sequences[-1].finish_reason == "length" for episode in flat]),
        "prompts": len(prompts),
        "episodes": len(flat),
        "failed": sum(len(episodes) for episodes in prompts) - len(flat),
        "seconds": seconds,
    }
    return summary


def _mean(values: SequenceABC[float | bool]) -> float | None:
    return float(np.mean(values)) if values else None
