"""Sampling of tokens from logits: pure functions over rows, one row per sequence.

A token is drawn by inverting the cumulative distribution at one uniform number that is derived from (seed, position)
alone. So a token does not depend on who shares the batch, and an interrupted sequence continues as if nothing had
happened.

The recorded logprob is that of the distribution after temperature and before anything that only narrows the choice:
top_k, top_p, min_p, and the ban on stop ids before `min_new_tokens`. For a request that asks for its sampling mask it
is renormalised over the tokens that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from clew.inference.protocol import SamplingParams


def _signed(value: int) -> int:
    """Return the lowest 64 bits of a number as a signed integer, as torch's int64 holds them."""
    value = int(value) & (1 << 64) - 1  # an integer of NumPy would overflow
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _mix(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014); int64 arithmetic wraps."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1 - 2^-23], float32, from int64 seeds and positions that broadcast."""
    mixed = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    # 23 bits: the product with a float32 total stays below the total, so no token of probability 0 is drawn.
    return ((mixed >> 41) & ((1 << 23) - 1)).float() * 2.0**-23


@dataclass(frozen=True, kw_only=True, eq=False)
class RowParams:
    """Sampling parameters of the current rows, as tensors; None if no row uses them."""

    seeds: Tensor
    """Seed of each row, int64 [rows]."""
    temperatures: Tensor | None
    """Temperatures, float32 [rows, 1]; None if all are 1. Greedy rows have 1."""
    greedy: Tensor | None
    """Greedy rows, bool [rows]; None if no row is greedy."""
    all_greedy: bool
    truncation: tuple[Tensor, Tensor, Tensor] | None
    """Values of top_k (int64, at least 1), top_p and min_p (float32), each [rows, 1]; None if no row truncates."""
    sorts: bool
    """True if some row has top_k or top_p, so that probabilities must be sorted."""

    @classmethod
    def stack(cls, rows: Sequence[SamplingParams], vocab: int, device: torch.device) -> RowParams:
        """Return the parameters of these rows, in this order."""
        greedy = [row.temperature == 0 for row in rows]
        temperatures = truncation = None
        if any(row.temperature not in (0, 1) for row in rows):
            temperatures = torch.tensor([[row.temperature or 1.0] for row in rows], device=device)
        sorts = any(0 < row.top_k < vocab or row.top_p < 1 for row in rows)
        if sorts or any(row.min_p > 0 for row in rows):
            truncation = (
                torch.tensor([[min(row.top_k or vocab, vocab)] for row in rows], device=device),
                torch.tensor([[row.top_p] for row in rows], device=device),
                torch.tensor([[row.min_p] for row in rows], device=device),
            )
        return cls(
            seeds=torch.tensor([_signed(row.seed) for row in rows], dtype=torch.int64, device=device),
            temperatures=temperatures,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            all_greedy=all(greedy),
            truncation=truncation,
            sorts=sorts,
        )


def truncate(probs_RV: Tensor, top_k_R1: Tensor, top_p_R1: Tensor, min_p_R1: Tensor, sorts: bool) -> Tensor:
    """Return the probabilities, with 0 for tokens that may not be drawn: top_k, then top_p of what is left, then min_p.

    The order is that of transformers. At least the likeliest token remains.

    Args:
        sorts: True if some row uses top_k or top_p.
    """
    # min_p can come first here: it compares with the likeliest token, which top_k and top_p always keep.
    kept = probs_RV >= min_p_R1 * probs_RV.amax(-1, keepdim=True)
    if sorts:
        ordered, order = probs_RV.sort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill(ranks >= top_k_R1, 0.0)
        before = cumulative(ordered) - ordered
        likely = (ranks < top_k_R1) & ((before < top_p_R1 * ordered.sum(-1, keepdim=True)) | (top_p_R1 >= 1))
        likely[:, 0] = True
        kept &= torch.zeros_like(kept).scatter_(-1, order, likely)
    return probs_RV * kept


def cumulative(values_RV: Tensor) -> Tensor:
    """Return the cumulative sums of each row. This also works if torch was told to use deterministic kernels only."""
    # torch has no deterministic kernel for this on CUDA, and would raise. A replay takes the drawn tokens from the
    # record, so it does not need one.
    if not torch.are_deterministic_algorithms_enabled():
        return values_RV.cumsum(-1)
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        return values_RV.cumsum(-1)
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)


def rising(cdf_RV: Tensor, drawable_RV: Tensor) -> Tensor:
    """Return the cumulative distribution, made to rise only where a token may be drawn."""
    # CUDA adds blocks in parallel: its float32 sums may fall, or rise at a token of probability 0 and so draw it.
    return cdf_RV.masked_fill(drawable_RV <= 0, 0.0).cummax(-1).values


class Drawn(NamedTuple):
    """The next token of each row."""

    ids_R: Tensor
    logprobs_R: Tensor
    """Logprobs before truncation, float32."""
    drawable_RV: Tensor | None
    """Probabilities before truncation, 0 for tokens that it cut off; None if no row truncates."""

    def masks(self, rows: list[int]) -> list[Tensor]:
        """Return for each of `rows` the IDs that its token was drawn from, and renormalise its logprob over them.

        This changes `logprobs_R` in place, so call it only once for a row.
        """
        assert self.drawable_RV is not None, "a row that truncates"
        drawable_KV = self.drawable_RV[rows]
        drawn_K = drawable_KV.gather(1, self.ids_R[rows][:, None])[:, 0]
        self.logprobs_R[rows] = (drawn_K / drawable_KV.sum(-1)).log()
        return [each.nonzero()[:, 0] for each in drawable_KV]


def choose(logits_RV: Tensor, params: RowParams, uniforms_R: Tensor, banned_RV: Tensor | None = None) -> Drawn:
    """Draw the next token of each row.

    Args:
        uniforms_R: One number per row, from `uniform`.
        banned_RV: True for tokens that may not be drawn now, per row, or [1, vocab] for all rows.
    """
    logits_RV = logits_RV.float()
    if params.temperatures is not None:
        logits_RV = logits_RV / params.temperatures
    logprobs_RV = torch.log_softmax(logits_RV, -1)
    # Of two tokens whose probabilities round to the same number, the logprobs know the likelier one.
    allowed_RV = logprobs_RV if banned_RV is None else logprobs_RV.masked_fill(banned_RV, -torch.inf)
    if params.all_greedy:
        ids_R1 = allowed_RV.argmax(-1, keepdim=True)
        return Drawn(ids_R1.squeeze(1), logprobs_RV.gather(1, ids_R1).squeeze(1), None)
    probs_RV = logprobs_RV.exp()
    if banned_RV is not None:
        probs_RV = probs_RV.masked_fill(banned_RV, 0.0)
        none_R1 = probs_RV.amax(-1, keepdim=True) == 0
        if none_R1.any():  # beside a banned token of probability 1, all others may round to 0: compare those alone
            rest_RV = torch.softmax(logits_RV.masked_fill(banned_RV, -torch.inf), -1)
            probs_RV = torch.where(none_R1, rest_RV, probs_RV)
    drawable_RV = probs_RV if params.truncation is None else truncate(probs_RV, *params.truncation, params.sorts)
    cdf_RV = cumulative(drawable_RV)
    if cdf_RV.is_cuda:
        cdf_RV = rising(cdf_RV, drawable_RV)
    ids_R1 = torch.searchsorted(cdf_RV, uniforms_R.unsqueeze(1) * cdf_RV[:, -1:], right=True)
    if params.greedy is not None:
        ids_R1 = torch.where(params.greedy.unsqueeze(1), allowed_RV.argmax(-1, keepdim=True), ids_R1)
    ids_R1 = ids_R1.clamp_(max=logprobs_RV.shape[1] - 1)  # with NaN logits, searchsorted returns V, which is no token
    logprobs_R = logprobs_RV.gather(1, ids_R1).squeeze(1)
    return Drawn(ids_R1.squeeze(1), logprobs_R, None if params.truncation is None else drawable_RV)
