"""Rotary embedding and RMSNorm as one operation each: numbers, gradients, and what they are not for."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from clew.training.rotary_and_norm import Norm, Rotation, quicken
from tests.models import tiny_model


def test_numbers_worked_out_by_hand() -> None:
    """A quarter turn takes (1, 2) to (-2, 1); the mean square of 3 and 4 is 12.5."""
    pair, cos, sin = torch.tensor([[[[1.0, 2.0]]]]), torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 2)
    assert Rotation.apply(pair, cos, sin).tolist() == [[[[-2, 1]]]]
    normed = Norm.apply(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0]), 3.5)
    assert normed.tolist() == [pytest.approx([3 / 4, 10 * 4 / 4])]


def test_gradients_are_those_of_differences() -> None:
    draw = torch.Generator().manual_seed(1)
    x, cos, sin = (torch.randn(2, 3, 4, 6, generator=draw, dtype=torch.float64) for _ in range(3))
    assert gradcheck(Rotation.apply, (x.requires_grad_(), cos, sin))
    weight = torch.randn(6, generator=draw, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda x, weight: Norm.apply(x, weight, 1e-6), (x, weight))


def computed(model: Any) -> list[torch.Tensor]:
    """Logits and gradients of some rows."""
    ids = torch.arange(2, 20).view(2, 9)
    model.zero_grad()
    logits = model(ids).logits
    logits.float().log_softmax(-1)[..., 3].sum().backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma", "gemma4", "gpt2"])
def test_a_family_computes_the_same(tmp_path, monkeypatch, family: str) -> None:
    model = tiny_model(tmp_path, family).eval()
    code = sys.modules[type(model).__module__]
    norms = {type(module) for module in model.modules() if type(module).__name__.endswith("RMSNorm")}
    for kind in norms:  # as transformers has them, also when another test has trained this family
        monkeypatch.setattr(kind, "forward", getattr(kind.forward, "__wrapped__", kind.forward))
    rotary = getattr(code, "apply_rotary_pos_emb", None)
    if rotary is not None:
        monkeypatch.setattr(code, "apply_rotary_pos_emb", getattr(rotary, "__wrapped__", rotary))
    theirs = {kind: kind.forward for kind in norms}
    before, exact = computed(model), computed(model.double())
    quicken(model.float())
    for then, now in zip(before, computed(model), strict=True):
        torch.testing.assert_close(now, then, rtol=1e-4, atol=1e-5 * max(1.0, float(then.abs().max())))
    assert all(map(torch.equal, exact, computed(model.double())))  # float64 is transformers' own
    replaced = {kind for kind in norms if kind.forward is not theirs[kind]}
    assert replaced == (set() if family == "gemma" else norms)  # Gemma's norm is another: 1 + weight
    if rotary is not None and family != "gemma4":  # whose function turns one tensor, not two
        assert code.apply_rotary_pos_emb is not getattr(rotary, "__wrapped__", rotary)


class ShiftedRMSNorm(nn.Module):
    """A norm that is what others are only where its setting is 0."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.weight, self.eps, self.shift = nn.Parameter(torch.ones(8)), 1e-6, shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (self.weight + self.shift)


def test_the_norms_of_a_second_model_are_tried_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShiftedRMSNorm, "forward", theirs := ShiftedRMSNorm.forward)
    plain, shifted = ShiftedRMSNorm(0), ShiftedRMSNorm(1)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    for model in (plain, plain):
        quicken(model)
        assert ShiftedRMSNorm.forward is not theirs
    for model in (shifted, plain):  # once both are there, neither may be replaced
        quicken(model)
        assert torch.equal(shifted(x), theirs(shifted, x)) and torch.equal(plain(x), theirs(plain, x))
