"""Attention of short rows against torch's kernel, in every small architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from clew.training.attention import NAMES, SHORT, use_attention
from clew.training.scoring import score

SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=8),
    "mistral, sliding": MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=7),
    "gemma3, sliding": Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=7),
    "gpt2": GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=256),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", [20, SHORT, SHORT + 5])
def test_short_attention_agrees_with_torchs_kernel(name: str, length: int) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa").eval()
    ids_BT = torch.randint(0, 48, (3, length))
    columns_N = torch.arange(1, length).repeat(3)
    rows_N = torch.arange(3).repeat_interleave(length - 1)

    def logprobs_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        scores = score(model, ids_BT, rows_N, columns_N, torch.ones(len(rows_N)))
        gradient = torch.autograd.grad(scores.logprobs_N.square().mean(), list(model.parameters()))
        return scores.logprobs_N.detach(), torch.cat([each.flatten() for each in gradient])

    expected = logprobs_and_gradient()
    assert use_attention(model) and model.config._attn_implementation == NAMES["sdpa"]
    for found, right in zip(logprobs_and_gradient(), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
