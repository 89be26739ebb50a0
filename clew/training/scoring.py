"""Logprobs of given tokens, and the hidden states at them.

This is the only module where predictions are shifted by one against the tokens that they predict.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map
from torch.utils.checkpoint import checkpoint

from clew.training.attention import packed_attention
from clew.training.packing import Packed

MAX_LOGITS = 2**26
"""Maximum number of logits (tokens x vocabulary) that are held for the backward pass.

If there are more, they are computed in chunks of about this size, and once more in the backward pass.
"""


@dataclass(frozen=True, kw_only=True)
class Masks:
    """Sampling masks: the tokens that each scored token was drawn from, after top_p, top_k or min_p removed others."""

    counts_N: Tensor
    """Number of tokens in each mask, int64; 0: no mask."""
    ids_M: Tensor
    """IDs of the tokens in all masks, one mask after the other, int64; M is the sum of the counts."""

    def cut(self, logits_NV: Tensor) -> Tensor:
        """Return the logits, with -inf for the tokens that could not be drawn."""
        drawable_NV = (self.counts_N == 0)[:, None].repeat(1, logits_NV.shape[1])
        tokens_M = torch.arange(len(self.counts_N), device=logits_NV.device).repeat_interleave(self.counts_N)
        drawable_NV[tokens_M, self.ids_M] = True
        return logits_NV.masked_fill(~drawable_NV, -torch.inf)

    def chunk(self, chunks: int) -> list[Masks]:
        """Split the masks as torch.chunk splits the scored tokens."""
        parts_C = self.counts_N.chunk(chunks)
        ids = self.ids_M.split([int(part.sum()) for part in parts_C])
        return [Masks(counts_N=counts, ids_M=each) for counts, each in zip(parts_C, ids, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One entry per scored token: float32, or float64 for a model in float64."""

    logprobs_N: Tensor
    """Logprobs in nats, which carry the gradient. For a reward model: its score of the text that ends in the token."""
    entropies_N: Tensor
    """Entropies in nats of the distributions that the tokens were drawn from. They carry a gradient only on request."""


def score(
    model: Any,
    input_ids_BT: Tensor,
    rows_N: Tensor,
    columns_N: Tensor,
    temperatures_N: Tensor | None = None,
    packed: Packed | None = None,
    *,
    masks: Masks | None = None,
    image_inputs: Mapping[str, Tensor] | None = None,
    max_logits: int | None = None,
    entropy_gradient: bool = False,
) -> Scores:
    """Return the logprobs of the tokens at (rows_N, columns_N), given the tokens before them in their rows.

    Rows are either padded or packed. Padding is on the right, with any valid ID: a causal model's tokens see nothing to
    their right, so no attention mask is needed (which lets attention take its fast causal path), and padding is never
    scored. Packed rows lie end to end in one row, for a model that `keeps_rows_apart`.

    Only the N hidden states that predict a scored token are projected to the vocabulary, and only their logits become
    float32. Hooks on the output embedding do this, so anything that an architecture does to its logits afterwards
    (scaling, soft-capping) is done here too.

    Args:
        model: A causal language model of transformers.
        columns_N: At least 1, as nothing predicts the first token of a row.
        temperatures_N: Divisors of the logits, float32; None: all are 1.
        packed: Positions of the rows in input_ids_BT [1, P]; None: padded rows, one below the other.
        masks: Tokens that each scored token was drawn from; None: all IDs. Probabilities are renormalised over these.
        image_inputs: Further inputs of the model for padded rows that show images.
        max_logits: Maximum number of logits that are held; None: MAX_LOGITS.
        entropy_gradient: Whether the entropies get a gradient; this keeps one more [N, V] tensor for the backward pass.
    """
    assert bool((columns_N > 0).all()), "the first token of a sequence cannot be trained on"
    inputs = {**_inputs(input_ids_BT, packed), **(image_inputs or {})}
    tokens_N = _tokens(input_ids_BT, rows_N, columns_N, packed)
    predictors_N = tokens_N - 1  # the shift by one
    targets_N = input_ids_BT.flatten()[tokens_N]
    head = model.get_output_embeddings()
    chunks = max(1, -(-len(tokens_N) * head.weight.shape[0] // (max_logits or MAX_LOGITS)))
    with packed_attention(packed), _Projection(head, predictors_N, all_at_once=chunks == 1) as projection:
        logits_NV = model(**inputs).logits
    if chunks == 1:
        assert logits_NV.shape[:-1] == predictors_N.shape, f"{type(model).__name__} changes the shape of its logits"
        scores = _score(logits_NV, targets_N, temperatures_N, masks, entropy_gradient)
    else:
        scores = projection.score_in_chunks(chunks, logits_NV, targets_N, temperatures_N, masks, entropy_gradient)
    if isinstance(model, FSDPModule) and not torch.is_grad_enabled():
        model.reshard()  # the outermost parameters, as a backward pass would
    return scores


def hidden_states(model: Any, input_ids_BT: Tensor, rows_N: Tensor, columns_N: Tensor, packed: Packed | None) -> Tensor:
    """Return the hidden states at the tokens (rows_N, columns_N) of a transformers model without its head: [N, D].

    Each depends on the token and those before it. Rows are padded or packed as for `score`.
    """
    with packed_attention(packed):
        hidden_BTD = model.base_model(**_inputs(input_ids_BT, packed)).last_hidden_state
    return hidden_BTD.flatten(0, 1)[_tokens(input_ids_BT, rows_N, columns_N, packed)]


def _inputs(input_ids_BT: Tensor, packed: Packed | None) -> dict[str, Any]:
    """Return a model's inputs, except for images."""
    inputs: dict[str, Any] = {"input_ids": input_ids_BT, "use_cache": False}
    if packed is None:
        return inputs
    return inputs | {"position_ids": packed.positions_P[None], "attention_mask": torch.ones_like(input_ids_BT)}


def _tokens(input_ids_BT: Tensor, rows_N: Tensor, columns_N: Tensor, packed: Packed | None) -> Tensor:
    """Return the positions of the tokens (rows_N, columns_N) in input_ids_BT, read as one row: [N]."""
    return columns_N + (rows_N * input_ids_BT.shape[1] if packed is None else packed.starts_R[rows_N])


def _score(
    logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor | None, masks: Masks | None, entropy_gradient: bool
) -> Scores:
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    if temperatures_N is not None:
        logits_NV = logits_NV.to(wide) / temperatures_N[:, None]
    logprobs_NV = torch.log_softmax(logits_NV if masks is None else masks.cut(logits_NV), dim=-1, dtype=wide)
    logprobs_N = logprobs_NV.gather(1, targets_N[:, None])[:, 0]
    # Last, so that `checkpoint`, which stops recomputing early, can skip the entropies if they need no gradient.
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        lowest = torch.finfo(logprobs_NV.dtype).min  # 0 times -inf would be NaN
        finite_NV = logprobs_NV if masks is None else logprobs_NV.clamp(min=lowest)
        entropies_N = -(logprobs_NV.exp() * finite_NV).sum(-1)
    return Scores(logprobs_N=logprobs_N, entropies_N=entropies_N)


class _Projection(ExitStack):
    """Context in which the output embedding gets only the predicting hidden states.

    Without `all_at_once`, it gets only the first of them, and the context records what the model then does to its
    logits, such as a division by a scale. `score_in_chunks` repeats that on the logits of the others.
    """

    def __init__(self, head: torch.nn.Module, predictors_N: Tensor, *, all_at_once: bool) -> None:
        super().__init__()
        self.head = head
        self.hidden_NH: Tensor
        self.afterwards: _Recording

        def before(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            self.hidden_NH = args[0].flatten(0, 1).index_select(0, predictors_N)
            return (self.hidden_NH if all_at_once else self.hidden_NH[:1],)

        def after(_: Any, args: Any, output: Tensor) -> None:
            if not all_at_once:
                self.afterwards = self.enter_context(_Recording(output))

        self.enter_context(head.register_forward_pre_hook(before))
        self.enter_context(head.register_forward_hook(after))

    def score_in_chunks(
        self,
        chunks: int,
        logits_1V: Tensor,
        targets_N: Tensor,
        temperatures_N: Tensor | None,
        masks: Masks | None,
        entropy_gradient: bool,
    ) -> Scores:
        """Return the scores, computed in chunks. `logits_1V` are the model's logits for the first hidden state."""

        def score_chunk(
            hidden_CH: Tensor, targets_C: Tensor, temperatures_C: Tensor | None, masks: Masks | None
        ) -> Scores:
            logits_CV = self.afterwards.repeat(self.head(hidden_CH), result=logits_1V)
            return _score(logits_CV, targets_C, temperatures_C, masks, entropy_gradient)

        parts: list[Any] = [self.hidden_NH.chunk(chunks), targets_N.chunk(chunks)]
        for each in (temperatures_N, masks):
            parts.append([None] * len(parts[0]) if each is None else each.chunk(chunks))
        scores = [
            checkpoint(score_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(*parts, strict=True)
        ]
        return Scores(
            logprobs_N=torch.cat([each.logprobs_N for each in scores]),
            entropies_N=torch.cat([each.entropies_N for each in scores]),
        )


class _Call(NamedTuple):
    function: Any
    args: Any
    kwargs: Any
    made: Tensor


class _Recording(TorchFunctionMode):
    """Recording of the operations on one tensor, so that they can be repeated on others."""

    def __init__(self, first: Tensor) -> None:
        super().__init__()
        self._first = first
        self._calls: list[_Call] = []
        self._traced = {id(first)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = args[0] if func is Tensor.__setitem__ else result  # an assignment returns None
        if isinstance(made, Tensor) and tree_any(lambda each: id(each) in self._traced, (args, kwargs)):
            self._calls.append(_Call(func, args, kwargs or {}, made))  # keeps the tensor alive, so its id stays unique
            self._traced.add(id(made))
        return result

    def repeat(self, other: Tensor, *, result: Tensor) -> Tensor:
        """Return what `result` would be if the computation had begun with `other`."""
        assert id(result) in self._traced, "the logits are not computed from the output embedding by torch's functions"
        values = {id(self._first): other}
        for call in self._calls:
            args, kwargs = tree_map(lambda each: values.get(id(each), each), (call.args, call.kwargs))
            again = call.function(*args, **kwargs)
            values[id(call.made)] = args[0] if again is None else again
        return values[id(result)]


class ValueModel(nn.Module):
    """A model of `clew.models.loading.load_value_model` that computes values for chosen tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids_BT: Tensor, rows_N: Tensor, columns_N: Tensor, packed: Packed | None = None) -> Tensor:
        """Return the value at each token (rows_N, columns_N), given that token and those before it: [N].

        Values are float32, or as wide as the model. Rows are padded or packed as for `score`.
        """
        head, hidden_ND = self.model.score, hidden_states(self.model, input_ids_BT, rows_N, columns_N, packed)
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        numbers_N = hidden_ND.to(wide) @ head.weight[0].to(wide)
        return numbers_N if head.bias is None else numbers_N + head.bias.to(wide)
