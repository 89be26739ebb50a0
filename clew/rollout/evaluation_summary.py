"""Evaluation on held-out prompts: the names of its groups, and the numbers that it reports."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceABC
from typing import Any

import numpy as np

from clew.rollout.episode import Episode

Z = 1.96
"""Number of standard deviations on each side of the mean that enclose 95 % of a normal distribution."""


def group_id(version: int, row: int) -> str:
    """Return the group ID of an evaluation prompt, such as v000020.g000003, which no training group has."""
    return f"v{version:06d}.g{row:06d}"


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the chance that at least one of k samples passes, given that `passed` of n did.

    Chen et al. 2021 (arXiv 2107.03374), eq. 1: 1 - C(n - passed, k) / C(n, k). Needs k <= n.
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def interval(values: SequenceABC[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean of one number per prompt; None for fewer than two prompts.

    Prompts are independent, but samples of one prompt are not, so the error is that of the mean over prompts (Miller
    2024, arXiv 2411.00640, section 2.2).
    """
    if len(values) < 2:
        return None
    mean, half = float(np.mean(values)), Z * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean - half, mean + half


def pass_interval(rates: SequenceABC[float], n_samples: int) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean of the prompts' pass rates, each in [0, 1]; None for no prompt.

    It is Wilson's score interval (1927), which stays within [0, 1] and has a width even if all prompts pass. Its number
    of trials is the number of independent trials whose mean would have the same variance: one per prompt if each prompt
    always passes or always fails, and n_samples (the maximum) per prompt if a prompt's samples are independent.
    """
    if not rates:
        return None
    p, variance = float(np.mean(rates)), float(np.var(rates))
    of_one_trial = p * (1 - p)
    n = len(rates) * (of_one_trial / max(variance, of_one_trial / n_samples) if of_one_trial > 0 else 1.0)
    half = Z * math.sqrt(of_one_trial / n + (Z / (2 * n)) ** 2)
    low, high = ((p + Z * Z / (2 * n) + side * half) / (1 + Z * Z / n) for side in (-1, 1))
    return max(0.0, low), min(1.0, high)


def passed(episode: Episode, above: float) -> bool:
    """Return whether an episode passes: it did not fail, and its total reward is above eval.pass_above."""
    return episode.error is None and episode.reward > above


def summarize(
    prompts: SequenceABC[SequenceABC[Episode]], *, n_samples: int, pass_above: float, seconds: float
) -> dict[str, Any]:
    """Return the summary of an evaluation. Failed episodes are counted in `failed` and nowhere else.

    The summary has pass@k for k = 1, 2, 4, ... up to n_samples, each over the prompts with at least k episodes that did
    not fail. `intervals` has the 95 % confidence interval of each pass@k and of the mean reward, by name.
    """
    scored = [[episode for episode in episodes if episode.error is None] for episodes in prompts]
    flat = [episode for episodes in scored for episode in episodes]
    summary: dict[str, Any] = {}
    intervals: dict[str, tuple[float, float] | None] = {}
    k = 1
    while k <= n_samples:
        estimates = [
            pass_at_k(len(episodes), sum(passed(episode, pass_above) for episode in episodes), k)
            for episodes in scored
            if len(episodes) >= k
        ]
        summary[f"pass@{k}"] = _mean(estimates)
        intervals[f"pass@{k}"] = pass_interval(estimates, n_samples)
        k *= 2
    intervals["reward"] = interval([float(np.mean([e.reward for e in episodes])) for episodes in scored if episodes])
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
        "intervals": intervals,
        "pass_above": pass_above,
        "failed": sum(len(episodes) for episodes in prompts) - len(flat),
        "seconds": seconds,
    }
    return summary


def _mean(values: SequenceABC[float | bool]) -> float | None:
    return float(np.mean(values)) if values else None
