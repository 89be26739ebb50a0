"""The logprobs of given tokens. The one place where predictions are shifted by one against what they predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One entry for each scored token."""

    logprobs_N: Tensor
    """float32, nats; carries the gradient. Of a reward model: its score of what ends in the token."""
    entropies_N: Tensor
    """float32, nats: of the distribution that the token was drawn from; carries a gradient where it was asked for."""


def score(
    model: Any,
    input_ids_BT: Tensor,
    rows_N: Tensor,
    columns_N: Tensor,
    temperatures_N: Tensor,
    *,
    entropy_gradient: bool = False,
) -> Scores:
    """The logprob of token input_ids_BT[rows_N, columns_N], given the tokens before it in its row.

    Rows are padded on the right with any valid ID: a causal model's tokens see nothing to their right, so no
    attention mask is needed (which lets attention take its fast causal path), and padding is never scored.

    Only the N hidden states that predict a scored token are projected to the vocabulary, and only those [N, V]
    logits become float32. The projection is reached by a hook on the output embedding, so that what an architecture
    does to its logits afterwards (scaling, soft-capping) is done here too.

    model: a causal language model of transformers.
    columns_N: at least 1; the first token of a row is predicted by nothing.
    temperatures_N: float32; the logits are divided by them.
    entropy_gradient: whether a gradient will be asked of the entropies, which holds one more [N, V] until then.
    """
    assert bool((columns_N > 0).all()), "the first token of a sequence cannot be trained on"
    predictors_N = rows_N * input_ids_BT.shape[1] + (columns_N - 1)  # the shift by one

    def keep_predictors(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (args[0].flatten(0, 1).index_select(0, predictors_N),)

    with model.get_output_embeddings().register_forward_pre_hook(keep_predictors):
        logits_NV = model(input_ids=input_ids_BT, use_cache=False).logits
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    assert logits_NV.shape[:-1] == predictors_N.shape, f"{type(model).__name__} changes the shape of its logits"
    logprobs_NV = torch.log_softmax(logits_NV / temperatures_N[:, None], dim=-1)
    targets_N = input_ids_BT[rows_N, columns_N]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return Scores(logprobs_N=logprobs_NV.gather(1, targets_N[:, None])[:, 0], entropies_N=entropies_N)
