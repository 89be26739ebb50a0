"""Whether a model is causal, and keeps packed rows apart. Found by trying: that depends on all of an architecture's
code."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clew.errors import ModelError
from clew.models import context_in, described
from clew.training.attention import NAMES, use_attention
from clew.training.packing import Packed
from clew.training.scoring import hidden_states, score

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layers that see other tokens through attention and its mask alone; what transformers calls them."""
LENGTHS = (19, 12)
"""Tokens of the rows that are tried, where the context has room for both."""
TOLERANCE = 1e-4
"""Nats between a token's logprobs, in float32 and above; of a model of values, which has none, the same of a hidden
state's direction."""
LOW_TOLERANCE = 0.1
"""The same in lower precisions, of one row whose last token differs."""
SHARES = (0.1, 0.01)
"""In lower precisions, of the difference that it makes when each row sees the one before: packed against alone, whose
roundings differ; and beside one row against beside another, whose roundings are mostly the same."""

log = logging.getLogger("clew.training")


@torch.no_grad()
def check_causal(model: Any) -> None:
    """Raise ModelError where a token's logprob depends on what follows it, or the value before it: no policy can sample
    by such logprobs, nor a critic know them."""
    row = _tokens(model, _lengths(model)[1], 0)
    otherwise = torch.cat([row[:-1], row[:1]])
    change = _largest(_predictions(model, row, [len(row)])[:-1] - _predictions(model, otherwise, [len(row)])[:-1])
    if change > (TOLERANCE if model.dtype.itemsize >= torch.float32.itemsize else LOW_TOLERANCE):
        raise ModelError(
            f"{type(model).__name__} is not causal: the logprobs or values of its tokens change with what follows them "
            f"(by {change:.2g}). It cannot be trained on text that it generates; of an encoder, such as BERT, "
            f'"is_decoder": true in its config.json makes a causal model.'
        )


@torch.no_grad()
def prepare_for_packing(model: Any) -> None:
    """Have a model compute its attention for packed rows where that gives the logprobs or values of rows that are
    apart. Else it is left as it was, and a line of the log says why."""
    name = type(model).__name__
    if kinds := set(getattr(model.config.get_text_config(), "layer_types", None) or []) - ATTENTION:
        log.warning("%s has layers of kind %s: its rows are padded, not packed.", name, ", ".join(sorted(kinds)))
        return
    lengths = _lengths(model)
    rows = [_tokens(model, length, number) for number, length in enumerate(lengths)]
    alone = torch.cat([_predictions(model, row, [len(row)]) for row in rows])
    before = model.config._attn_implementation
    if not use_attention(model):
        log.warning("%s computes its attention in a way of its own: its rows are padded, not packed.", name)
        return
    try:
        packed = _predictions(model, torch.cat(rows), lengths)
        beside_another = _predictions(model, torch.cat([_tokens(model, lengths[0], 2), rows[1]]), lengths)
    except Exception as error:  # an architecture may raise anything at inputs that it was not made for
        problem = f"fails on packed rows ({described(error)})"
    else:
        second = slice(lengths[0] - 1, None)
        differences = _largest(packed - alone), _largest(beside_another[second] - packed[second])
        allowed = TOLERANCE, TOLERANCE
        if model.dtype.itemsize < torch.float32.itemsize:
            joined = _predictions(model, torch.cat(rows), [sum(lengths)])
            leak = _largest(torch.cat([joined[: lengths[0] - 1], joined[lengths[0] :]]) - alone)
            allowed = SHARES[0] * leak, SHARES[1] * leak
        if differences[0] <= allowed[0] and differences[1] <= allowed[1]:
            return
        problem = f"does not keep packed rows apart (what it predicts changes by {max(differences):.2g})"
    model.set_attn_implementation(before)
    log.warning("%s %s: its rows are padded, not packed.", name, problem)


def keeps_rows_apart(model: Any) -> bool:
    """Whether `prepare_for_packing` found that the model's rows can be packed."""
    return model.config._attn_implementation in NAMES.values()


def _lengths(model: Any) -> list[int]:
    """LENGTHS, or as much as the context has room for."""
    context = context_in(model.config)[0] or 2 * max(LENGTHS)
    return [min(length, max(2, context // 2)) for length in LENGTHS]


def _tokens(model: Any, length: int, number: int) -> Tensor:
    """[T] spread over the vocabulary."""
    embeddings = model.get_output_embeddings() or model.get_input_embeddings()
    return 7919 * (torch.arange(length, device=model.device) + 100 * number + 1) % embeddings.weight.shape[0]


def _predictions(model: Any, ids_T: Tensor, lengths: list[int]) -> Tensor:
    """What follows from the tokens before it for each token of packed rows, but for their first: its logprob; of a
    model of values, whose head may be zero, the hidden state that its value is made of, at length 1."""
    rows_N = torch.cat([torch.full((length - 1,), row) for row, length in enumerate(lengths)]).to(ids_T.device)
    columns_N = torch.cat([torch.arange(1, length) for length in lengths]).to(ids_T.device)
    packed = Packed.of(lengths, ids_T.device) if len(lengths) > 1 else None
    if model.get_output_embeddings() is None:
        return normalize(hidden_states(model, ids_T[None], rows_N, columns_N - 1, packed).float(), dim=-1)
    return score(model, ids_T[None], rows_N, columns_N, torch.ones_like(rows_N, dtype=torch.float32), packed).logprobs_N


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())
