"""Checks that a model is causal and keeps packed rows apart.

Both checks run the model on a few tokens, because the result depends on all of an architecture's code.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clew.errors import ModelError, described
from clew.models.architecture import context_in
from clew.training.attention import NAMES, use_attention
from clew.training.packing import Packed
from clew.training.scoring import hidden_states, score

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Names, in transformers, of layer types that see other tokens only through attention and its mask."""
LENGTHS = (19, 12)
"""Numbers of tokens of the two rows that are tried, if the context has room for both."""
TOLERANCE = 1e-4
"""Largest allowed difference of a token's logprob, in nats, for float32 and wider types. For a value model, which has
no logprobs: of a hidden state that is normalized to length 1."""
LOW_TOLERANCE = 0.1
"""Largest such difference that `check_causal` allows in lower precisions."""
SHARES = (0.1, 0.01)
"""Largest differences that `prepare_for_packing` allows in lower precisions, as shares of the difference that it
measures when a row does see the row before it.

The first compares packed with separate rows, whose rounding differs. The second compares one row packed beside two
different rows, where most rounding is equal.
"""

log = logging.getLogger("clew.training")


@torch.no_grad()
def check_causal(model: Any) -> None:
    """Raise ModelError if a token's logprob or value depends on later tokens.

    Later tokens do not exist yet when a token is sampled, so such logprobs cannot be those of the sampling policy.
    """
    row = _tokens(model, _lengths(model)[1], 0)
    otherwise = torch.cat([row[:-1], row[:1]])
    change = _largest(_predictions(model, row, [len(row)])[:-1] - _predictions(model, otherwise, [len(row)])[:-1])
    if change > (TOLERANCE if model.dtype.itemsize >= torch.float32.itemsize else LOW_TOLERANCE):
        raise ModelError(
            f"{type(model).__name__} is not causal: the logprobs or values of its tokens change with what follows them "
            f"(by {change:.2g}). It cannot be trained on text that it generates. To make an encoder such as "
            f'BERT causal, set "is_decoder": true in its config.json.'
        )


@torch.no_grad()
def prepare_for_packing(model: Any) -> None:
    """Switch a model to attention for packed rows, if these then get the logprobs or values of separate rows.

    Otherwise the model is left as it was, and the log says why.
    """
    name = type(model).__name__
    if kinds := set(getattr(model.config.get_text_config(), "layer_types", None) or []) - ATTENTION:
        log.warning("%s has layers of kind %s: its rows are padded, not packed.", name, ", ".join(sorted(kinds)))
        return
    lengths = _lengths(model)
    rows = [_tokens(model, length, number) for number, length in enumerate(lengths)]
    separate = torch.cat([_predictions(model, row, [len(row)]) for row in rows])
    before = model.config._attn_implementation
    if not use_attention(model):
        log.warning("%s has attention code of its own, so its rows are padded, not packed.", name)
        return
    try:
        packed = _predictions(model, torch.cat(rows), lengths)
        beside_another = _predictions(model, torch.cat([_tokens(model, lengths[0], 2), rows[1]]), lengths)
    except Exception as error:  # an architecture may raise anything at inputs that it was not made for
        problem = f"fails on packed rows ({described(error)})"
    else:
        second = slice(lengths[0] - 1, None)
        differences = _largest(packed - separate), _largest(beside_another[second] - packed[second])
        allowed = TOLERANCE, TOLERANCE
        if model.dtype.itemsize < torch.float32.itemsize:
            joined = _predictions(model, torch.cat(rows), [sum(lengths)])
            leak = _largest(torch.cat([joined[: lengths[0] - 1], joined[lengths[0] :]]) - separate)
            allowed = SHARES[0] * leak, SHARES[1] * leak
        if differences[0] <= allowed[0] and differences[1] <= allowed[1]:
            return
        problem = f"does not keep packed rows apart (what it predicts changes by {max(differences):.2g})"
    model.set_attn_implementation(before)
    log.warning("%s %s: its rows are padded, not packed.", name, problem)


def keeps_rows_apart(model: Any) -> bool:
    """Return whether `prepare_for_packing` found that the model's rows can be packed."""
    return model.config._attn_implementation in NAMES.values()


def _lengths(model: Any) -> list[int]:
    """Return LENGTHS, or smaller numbers if the context is too short."""
    context = context_in(model.config)[0] or 2 * max(LENGTHS)
    return [min(length, max(2, context // 2)) for length in LENGTHS]


def _tokens(model: Any, length: int, number: int) -> Tensor:
    """Return token IDs [T] that are spread over the vocabulary."""
    embeddings = model.get_output_embeddings() or model.get_input_embeddings()
    return 7919 * (torch.arange(length, device=model.device) + 100 * number + 1) % embeddings.weight.shape[0]


def _predictions(model: Any, ids_T: Tensor, lengths: list[int]) -> Tensor:
    """Return the logprob of each token except the first of each row: [N].

    For a value model, return the hidden states from which the values are computed, [N, D], normalized to length 1: the
    values themselves say nothing if the model's head is still zero.
    """
    rows_N = torch.cat([torch.full((length - 1,), row) for row, length in enumerate(lengths)]).to(ids_T.device)
    columns_N = torch.cat([torch.arange(1, length) for length in lengths]).to(ids_T.device)
    packed = Packed.of(lengths, ids_T.device) if len(lengths) > 1 else None
    if model.get_output_embeddings() is None:
        return normalize(hidden_states(model, ids_T[None], rows_N, columns_N - 1, packed).float(), dim=-1)
    return score(model, ids_T[None], rows_N, columns_N, packed=packed).logprobs_N


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())
