"""Rotary embedding and RMSNorm in fewer passes over memory than transformers' own code takes.

On a CPU both are limited by memory bandwidth: with one operation after another, and autograd's graph of each, they take
a third of the forward and backward pass of a small model. Here each is one operation, with a gradient written by hand.

Su et al., RoFormer, 2021 (arXiv 2104.09864); Zhang and Sennrich, Root Mean Square Layer Normalization, 2019 (arXiv
1910.07467).
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor

ROTARY = "apply_rotary_pos_emb"
"""Name of transformers' function, in the module of each architecture that has it."""

EPSILONS = ("variance_epsilon", "eps")
"""Names of the norm's epsilon in different architectures."""

TOLERANCE = 1e-5
"""Largest allowed difference, relative and absolute, in float32."""

Computes = Callable[..., Any]

_quick: set[Computes] = set()
"""Functions that have replaced transformers' own."""

_other: set[type] = set()
"""Norms that compute something else with some settings. They keep transformers' code with all settings."""


def quicken(model: Any) -> None:
    """Replace both operations in a model's architecture, for this process, if a trial gives equal values and gradients.

    The replacements compute float32 on the CPU. Other cases still use transformers' code: other devices and precisions,
    slices of tensor parallelism, and heads that are rotated only in part.
    """
    norms: defaultdict[type, dict[str, Any]] = defaultdict(dict)
    for module in model.modules():
        # Some norms of Gemma 3n and Gemma 4 have no weight. Modules with other settings may compute something else.
        if type(module).__name__.endswith("RMSNorm") and getattr(module, "weight", None) is not None:
            settings = {name: each for name, each in vars(module).items() if isinstance(each, int | float | str)}
            norms[type(module)][repr(sorted(settings.items()))] = module
    for code in {sys.modules[type(module).__module__] for module in model.modules()}:
        slow = getattr(code, ROTARY, None)
        if slow is not None and _agrees(slow, quick := _rotary(slow), _of_rotation):
            setattr(code, ROTARY, quick)
            _quick.add(quick)
    for kind, modules in norms.items():
        epsilon = next((name for name in EPSILONS for module in modules.values() if hasattr(module, name)), None)
        if epsilon is None or kind in _other:
            continue
        # A second model may have other settings than the one whose norm was replaced first, so they are tried again.
        replaced = kind.forward in _quick
        slow = kind.forward.__wrapped__ if replaced else kind.forward
        quick = kind.forward if replaced else _norm(slow, epsilon)
        if all(_agrees(slow, quick, partial(_of_norm, module)) for module in modules.values()):
            kind.forward = quick
            _quick.add(quick)
        else:
            kind.forward = slow
            _other.add(kind)


def _agrees(slow: Computes, quick: Computes, results: Callable[[Computes], list[Tensor]]) -> bool:
    """Return whether both functions have the same results. False, too, if `slow` is already a replacement."""
    if slow in _quick:
        return False
    try:
        pairs = list(zip(results(slow), results(quick), strict=True))
    except Exception:  # an architecture's own definition may be anything
        return False
    return all(torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE) for one, other in pairs)


def _plain(*tensors: Tensor) -> bool:
    return all(
        each.device.type == "cpu" and each.dtype == torch.float32 and not isinstance(each, DTensor) for each in tensors
    )


def _rotary(slow: Computes) -> Computes:
    @wraps(slow)
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        whole = cos.dim() == 3 and cos.shape[-1] == q.shape[-1] == k.shape[-1]
        if more or named or not (whole and _plain(q, k, cos, sin)):
            return slow(q, k, cos, sin, *more, **named)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return Rotation.apply(q, cos, sin), Rotation.apply(k, cos, sin)

    return rotary


def _norm(slow: Computes, epsilon: str) -> Computes:
    @wraps(slow)
    def forward(self: Any, hidden_states: Tensor) -> Any:
        weight = getattr(self, "weight", None)
        if weight is None or not _plain(hidden_states, weight):
            return slow(self, hidden_states)
        return Norm.apply(hidden_states, weight, getattr(self, epsilon))

    return forward


class Rotation(Function):
    """Rotation of the pairs (i, i + D / 2) of the last dimension by angles, given as cosines and sines.

    x is [batch, heads, tokens, D]; cos and sin are broadcast to it and get no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        turned = x * cos
        turned[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        turned[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return turned

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), (cos, sin) = gradients, ctx.saved_tensors
        half = gradient.shape[-1] // 2
        back = gradient * cos
        back[..., :half].addcmul_(gradient[..., half:], sin[..., half:])
        back[..., half:].addcmul_(gradient[..., :half], sin[..., :half], value=-1)
        return back, None, None


class Norm(Function):
    """RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        mean = torch.linalg.vecdot(x, x).unsqueeze(-1) / x.shape[-1]
        scale = mean.add_(epsilon).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, weight, scale)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,), (normed, weight, scale) = gradients, ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * normed).flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            inner = gradient * weight
            along = torch.linalg.vecdot(inner, normed).unsqueeze(-1) / -normed.shape[-1]
            of_x = inner.addcmul_(normed, along).mul_(scale)
        return of_x, of_weight, None


def _of_rotation(rotary: Computes) -> list[Tensor]:
    """Return the results of a rotary function for some tensors, and the gradients."""
    draw = torch.Generator().manual_seed(0)
    q, k, to_q, to_k = (torch.randn(2, heads, 3, 8, generator=draw) for heads in (4, 2, 4, 2))
    angles = torch.randn(2, 3, 4, generator=draw)
    cos, sin = (torch.cat((each, each), -1) for each in (angles.cos(), angles.sin()))
    q, k = q.requires_grad_(), k.requires_grad_()
    with torch.enable_grad():
        turned = rotary(q, k, cos, sin)
        return [*turned, *torch.autograd.grad(turned, (q, k), (to_q, to_k))]


def _of_norm(module: Any, forward: Computes) -> list[Tensor]:
    """Return the results of a norm for some tensors, and the gradients, with random weights instead of the module's.

    Both large and small numbers are tried; for small ones epsilon matters.
    """
    draw = torch.Generator().manual_seed(0)
    tried = copy.deepcopy(module).to("cpu", torch.float32).requires_grad_()
    size = tried.weight.shape[-1]
    tried.weight.data = torch.randn(size, generator=draw)
    results = []
    for scale in (1.0, 1e-3):
        x, to_normed = (torch.randn(2, 3, size, generator=draw) for _ in range(2))
        x = x.mul_(scale).requires_grad_()
        with torch.enable_grad():
            normed = forward(tried, x)
            of_x, of_weight = torch.autograd.grad(normed, (x, tried.weight), to_normed)
        results += [normed, of_x * scale, of_weight]
    return results
