"""Metrics of a batch, computed from arrays that the step has anyway. Pure NumPy.

Metrics of the loss, such as `clip_share`, come from `decoupled` in `clew.algorithms.losses`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

import numpy as np

from clew.algorithms import ADVANTAGES
from clew.algorithms.kl import divergences
from clew.algorithms.rejection import BY_VETO
from clew.algorithms.reward_statistics import SAME
from clew.record.rows import Sequence, by_episode


def rollout_metrics(sequences: SequenceABC[Sequence]) -> dict[str, float]:
    """Return metrics of a batch: rewards of episodes, the share of groups in which all rewards are equal, lengths
    (trained tokens per episode) and the share of episodes that were cut off."""
    episodes = list(by_episode(sequences).values())
    firsts, lasts = [rows[0] for rows in episodes], [rows[-1] for rows in episodes]
    lengths = [sum(int(row.loss_mask.sum()) for row in rows) for rows in episodes]
    rewards = np.array([row.reward for row in firsts])
    by_group: dict[str, set[float]] = {}
    for sequence in sequences:
        by_group.setdefault(sequence.group_id, set()).add(sequence.reward)
    names = sorted({name for row in firsts for name in row.rewards})
    by_name = {
        f"reward/{name}": float(np.mean([row.rewards[name] for row in firsts if name in row.rewards])) for name in names
    }
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        **by_name,
        "groups": float(len(by_group)),
        "equal_groups_share": float(np.mean([len(rewards) == 1 for rewards in by_group.values()])),
        "episodes": float(len(episodes)),
        "sequences": float(len(sequences)),
        "response_length": float(np.mean(lengths)),
        "response_length_max": float(max(lengths)),
        "truncated_share": float(np.mean([row.finish_reason == "length" for row in lasts])),
    }


def correlation_metrics(
    sequences: SequenceABC[Sequence], advantages: SequenceABC[np.ndarray], method: str
) -> dict[str, float]:
    """Return the correlation of a user's own advantages with the rewards; nothing for built-in advantages.

    It is computed over all sequences, from the reward and the mean advantage, after the group's mean is subtracted from
    both. It is left out if rewards or advantages do not differ within groups.

    Args:
        advantages: Advantages of each sequence's tokens, [T].
        method: Value of algorithm.advantages.
    """
    if method in ADVANTAGES:
        return {}
    by_group: dict[str, list[tuple[float, float]]] = {}
    for row, values_T in zip(sequences, advantages, strict=True):
        if (values_N := values_T[row.loss_mask]).size:
            by_group.setdefault(row.group_id, []).append((row.reward, float(values_N.mean(dtype=np.float64))))
    pairs = [np.array(group) - np.mean(group, axis=0) for group in by_group.values()]
    if not pairs:
        return {}
    rewards_B, advantages_B = np.concatenate(pairs).T
    size = float(np.linalg.norm(rewards_B) * np.linalg.norm(advantages_B))
    # Rounding alone is no difference: a mean of equal numbers may differ from them in its last bit.
    if min(np.abs(rewards_B).max(), np.abs(advantages_B).max()) < SAME or not size:
        return {}
    return {"advantage_reward_correlation": float(rewards_B @ advantages_B / size)}


def lag_metrics(lag_N: np.ndarray) -> dict[str, float]:
    """Return how many versions the trained tokens lag behind the trainer's weights at the start of the step."""
    return {"lag_mean": float(lag_N.mean()), "lag_max": float(lag_N.max())} if lag_N.size else {}


def gap_metrics(behaviour_N: np.ndarray, proximal_N: np.ndarray, lag_N: np.ndarray) -> dict[str, float]:
    """Return the gap between the logprobs at the start of the step and those recorded at sampling.

    The metrics are the mean and largest absolute difference, and KL(behaviour || proximal) by k3: over all tokens, over
    those without lag (the disagreement between trainer and inference engine about the same weights), and over those
    with lag. A mean over no tokens is left out.
    """
    if not behaviour_N.size:
        return {}
    difference_N = proximal_N.astype(np.float64) - behaviour_N
    k3_N = divergences(behaviour_N, proximal_N, "k3")
    by_lag = {"mismatch_k3": k3_N[lag_N == 0], "stale_k3": k3_N[lag_N > 0]}
    return {
        "behaviour_gap_mean": float(np.abs(difference_N).mean()),
        "behaviour_gap_max": float(np.abs(difference_N).max()),
        "behaviour_k3": float(k3_N.mean()),
        **{name: float(values.mean()) for name, values in by_lag.items() if values.size},
    }


def rejection_metrics(why_N: np.ndarray, rows_N: np.ndarray) -> dict[str, float]:
    """Return the shares of trained tokens and of sequences that were rejected, and of sequences with a veto.

    Args:
        why_N: Reason for each token, see `clew.algorithms.rejection`; 0: kept.
        rows_N: Sequence of each token.
    """
    if not why_N.size:
        return {}
    sequences, vetoed_N = len(np.unique(rows_N)), why_N.astype(np.int64) & BY_VETO > 0
    return {
        "rejected_share": float((why_N > 0).mean()),
        "rejected_sequences_share": len(np.unique(rows_N[why_N > 0])) / sequences,
        "veto_share": len(np.unique(rows_N[vetoed_N])) / sequences,
    }
