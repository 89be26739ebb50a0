"""Training on preferences: pairs of completions of one prompt, first the chosen one, then the rejected one.

Rows 2k and 2k + 1 of a batch are a pair, and stay together in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from clew.algorithms.losses import PolicyLoss
from clew.training.batching import Plan, deal
from clew.training.scoring import Scores
from clew.training.tokens import MicroBatch, Tokens


def deal_pairs(lengths: Sequence[int], *, budget: int, packed: bool, ranks: int = 1, width: int = 1) -> list[list[int]]:
    """Return micro-batches of whole pairs for all ranks; see `clew.training.batching.deal`."""
    both = [(lengths[row], lengths[row + 1]) for row in range(0, len(lengths), 2)]
    pairs = [sum(each) if packed else 2 * max(each) for each in both]
    dealt = deal(pairs, range(len(pairs)), budget=budget, packed=packed, ranks=ranks, width=width)
    return [[row for pair in each for row in (2 * pair, 2 * pair + 1)] for each in dealt]


def pair_losses(
    tokens: Tokens, plan: Plan, *, beta: float | None, reference_S: np.ndarray | None
) -> Callable[[MicroBatch, Scores], PolicyLoss]:
    """Return the function that computes the losses of a micro-batch.

    The loss of a pair is spread over its trained tokens, so that the mean over all tokens is the mean over the pairs.
    The same holds for the metrics.

    Args:
        beta: DPO's beta; None: the scores come from a reward model.
        reference_S: Logprobs of the reference model, for DPO.
    """
    pairs = sum(len(rows) for minibatch in plan for rows in minibatch) // 2
    share = sum(tokens.trained_in(rows) for minibatch in plan for rows in minibatch) / pairs

    def loss_of(micro: MicroBatch, scores: Scores) -> PolicyLoss:
        ones_N = torch.ones_like(scores.logprobs_N)
        chosen_P, rejected_P = _sum_by_pair(scores.logprobs_N, micro.rows_N)
        if beta is None:
            margins_P = chosen_P - rejected_P
        else:
            assert reference_S is not None, "DPO needs the logprobs of a reference model"
            reference_N = torch.from_numpy(reference_S[micro.where_N]).to(ones_N.device)
            margins_P = dpo_margins(chosen_P, rejected_P, *_sum_by_pair(reference_N, micro.rows_N), beta=beta)
        loss_P = preference_loss(margins_P)
        trained_P = sum(_sum_by_pair(ones_N, micro.rows_N))
        margins_P = margins_P.detach()
        sums = {"preference/accuracy": (margins_P > 0).sum() * share, "preference/margin": margins_P.sum() * share}
        return PolicyLoss(per_token_N=(loss_P / trained_P * share)[micro.rows_N // 2], sums=sums)

    return loss_of


def dpo_margins(
    chosen_P: Tensor, rejected_P: Tensor, reference_chosen_P: Tensor, reference_rejected_P: Tensor, *, beta: float
) -> Tensor:
    """Return DPO's margin of each pair, [P] (arXiv 2305.18290, equation 7).

    It is beta (log pi/pi_ref of the chosen - log pi/pi_ref of the rejected). All inputs are logprobs of whole
    completions, summed over their tokens.
    """
    return beta * ((chosen_P - reference_chosen_P) - (rejected_P - reference_rejected_P))


def preference_loss(margins_P: Tensor) -> Tensor:
    """Return -log sigmoid(margin) of each pair, [P]: the loss of DPO, and of reward models.

    A reward model's margin is the score of the chosen less that of the rejected: the Bradley-Terry loss of InstructGPT
    (arXiv 2203.02155, equation 1).
    """
    return -torch.nn.functional.logsigmoid(margins_P)


def sft_loss(micro: MicroBatch, scores: Scores) -> PolicyLoss:
    """Return the cross-entropy of each token of a demonstration, in nats."""
    return PolicyLoss(per_token_N=-scores.logprobs_N, sums={})


def _sum_by_pair(numbers_N: Tensor, rows_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over the tokens of each chosen and of each rejected completion: [P] and [P]."""
    sums_R = numbers_N.new_zeros(int(rows_N.max()) + 1).index_add(0, rows_N, numbers_N)
    return sums_R[0::2], sums_R[1::2]
