"""Losses of single tokens, as pure functions on named tensors. The caller takes the mean over tokens.

All tensors have one entry a trained token ([N]; any common shape will do) and hold natural logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clew.config import Algorithm


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """What each token contributes, and what is worth watching."""

    per_token_N: Tensor
    """float32, carries the gradient; the loss of a mini-batch is its mean over all tokens."""
    sums: dict[str, Tensor]
    """Sums over the N tokens: divided by their number they are metrics."""


def policy_loss(
    *,
    logprobs_N: Tensor,
    proximal_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
    reference_N: Tensor | None = None,
    kl_coef: float = 0.0,
) -> PolicyLoss:
    """The decoupled clipped objective of AReaL (arXiv 2505.24298, equation 5), with a KL term.

    loss = -weight x min(ratio x A, clip(ratio, 1 - clip_low, 1 + clip_high) x A) + kl_coef x k3(current, reference)

    ratio = current / proximal: how far this step has moved the policy, which the clip bounds.
    weight = min(proximal / behaviour, importance_cap): how much likelier the token was when the step began than when
    it was sampled; a constant. Where proximal equals behaviour (no lag) it is 1 and this is GRPO (arXiv 2402.03300).

    logprobs_N: current; the only one through which a gradient flows.
    proximal_N: at the start of the step.   behaviour_N: of the weights that sampled the token.
    reference_N: of the model that the run began with; None: no KL term.
    """
    ratio_N = torch.exp(logprobs_N - proximal_N)
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    weight_N = torch.exp(proximal_N - behaviour_N).clamp(max=importance_cap)
    loss_N = -weight_N * torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    with torch.no_grad():
        sums = {
            "clip_share": (clipped_N * advantages_N < ratio_N * advantages_N).sum(),
            "importance_weight": weight_N.sum(),
            "importance_capped_share": (weight_N >= importance_cap).sum(),
        }
    if reference_N is not None:
        kl_N = k3(logprobs_N, reference_N)
        loss_N = loss_N + kl_coef * kl_N
        sums["kl"] = kl_N.detach().sum()
    return PolicyLoss(per_token_N=loss_N, sums=sums)


def loss_options(algorithm: Algorithm) -> dict[str, Any]:
    """What the configuration says of `policy_loss`."""
    return {name: getattr(algorithm, name) for name in ("clip_low", "clip_high", "importance_cap", "kl_coef")}


def k3(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """KL(p || q) of each token, estimated from a sample of p: q/p - log(q/p) - 1. Never negative; zero where p = q.

    logprobs_N: log p.   other_N: log q.   Schulman, http://joschu.net/blog/kl-approx.html
    """
    log_ratio_N = other_N - logprobs_N
    return torch.exp(log_ratio_N) - log_ratio_N - 1


def supervised_loss(logprobs_N: Tensor) -> Tensor:
    """Cross-entropy of each token of a demonstration, nats."""
    return -logprobs_N
