"""Forward pass of Llama's architecture (Llama, Mistral, Qwen2, Qwen3), with a third of the torch operations.

The weights stay the model's own parameters: query, key and value (and gate and up) are laid side by side in memory, so
that one product computes all of them, and each parameter becomes a view of its part. So weights that are loaded into
the model in place change the joined tensors, too. Only float32 is supported: in bfloat16, results would be rounded at
other points than in the model that is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm
from transformers import Cache

from clew.inference.attention import attend

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of one layer, as the forward pass uses them."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norms: tuple[Tensor, Tensor] | None
    out: Any
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    act: Any
    down: Any
    window: int | None


class FusedForward:
    """Fused forward pass of one model; created by `build`."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._base, self._head = model.model, model.lm_head
        self._eps = config.rms_norm_eps
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._layers = [_layer(layer) for layer in self._base.layers]
        self._scaling = self._base.layers[0].self_attn.scaling
        self._rope = torch.zeros(0)
        """cos and sin (its first half negated) of each position, [positions, 2, dim]."""

    def forward(self, ids_RT: Tensor, positions_RT: Tensor, cache: Cache, longest: int) -> Tensor:
        """Prefill (T tokens per row, into a PrefillCache) or decode (one token per row, into a RowCache).

        Args:
            longest: A number greater than every position.

        Returns:
            Logits [rows, vocab] after the last token.
        """
        (n, length), heads, kv_heads, eps = ids_RT.shape, self._heads, self._kv_heads, self._eps
        rope = self._rope_for(longest).index_select(0, positions_RT.reshape(-1))
        cos, sin = rope[:, 0:1], rope[:, 1:2]
        dim, half = cos.shape[-1], cos.shape[-1] // 2
        hidden = self._base.embed_tokens(ids_RT.reshape(-1))
        for index, layer in enumerate(self._layers):
            normed = rms_norm(hidden, layer.norm.shape, layer.norm, eps)
            qkv = linear(normed, layer.qkv, layer.qkv_bias).view(n * length, heads + 2 * kv_heads, dim)
            qk = qkv[:, : heads + kv_heads]
            if layer.qk_norms is not None:
                query, key = qk.split((heads, kv_heads), 1)
                query, key = (rms_norm(x, (dim,), w, eps) for x, w in zip((query, key), layer.qk_norms, strict=True))
                qk = torch.cat((query, key), 1)
            # The rotation takes one roll and one fused product, because `_rope_for` has negated the first half of sin.
            qk = torch.addcmul(qk * cos, qk.roll(half, -1), sin).view(n, length, heads + kv_heads, dim).transpose(1, 2)
            value = qkv.view(n, length, heads + 2 * kv_heads, dim)[:, :, heads + kv_heads :].transpose(1, 2)
            keys, values = cache.update(qk[:, heads:], value, index)
            attended, _ = attend(None, qk[:, :heads], keys, values, None, self._scaling, layer.window)
            hidden = _add_linear(hidden, attended.reshape(n * length, heads * dim), layer.out)
            normed = rms_norm(hidden, layer.mlp_norm.shape, layer.mlp_norm, eps)
            gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            hidden = _add_linear(hidden, layer.act(gate) * up, layer.down)
        last = hidden.view(n, length, -1)[:, -1]
        return self._head(rms_norm(last, self._base.norm.weight.shape, self._base.norm.weight, eps))

    def _rope_for(self, length: int) -> Tensor:
        """Return `_rope` with more than `length` positions. If it is too short, it is replaced by a longer one."""
        if length >= self._rope.shape[0]:
            count = max(256, 2 * length)
            device = self._base.embed_tokens.weight.device
            cos, sin = self._base.rotary_emb(torch.zeros(1, device=device), torch.arange(count, device=device)[None])
            half = sin.shape[-1] // 2
            self._rope = torch.stack((cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)), 1)
        return self._rope


def build(model: Any) -> FusedForward | None:
    """Return the fused forward pass for this model; None if its architecture or dtype is not supported."""
    config = model.config
    plain_rope = getattr(config, "rope_parameters", {}).get("rope_type") in ("default", "linear", "llama3", "yarn")
    if type(model).__name__ not in ARCHITECTURES or model.dtype != torch.float32 or not plain_rope:
        return None
    return FusedForward(model)


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _fuse_linears(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _fuse_linears(mlp.gate_proj, mlp.up_proj)
    qk_norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
    # Each layer of Qwen has its own window, or None; Mistral's layers all use the configuration's.
    window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return Layer(
        norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        qk_norms=qk_norms,
        out=attention.o_proj,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        act=mlp.act_fn,
        down=mlp.down_proj,
        window=window,
    )


def _fuse_linears(*linears: Any) -> tuple[Tensor, Tensor | None]:
    """Lay the weights (and biases) of several linears side by side in one tensor; each becomes a view of it."""
    weight = torch.cat([each.weight.data for each in linears])
    bias = None if linears[0].bias is None else torch.cat([each.bias.data for each in linears])
    begin = 0
    for part in linears:
        end = begin + part.weight.shape[0]
        part.weight.data = weight[begin:end]
        if bias is not None:
            part.bias.data = bias[begin:end]
        begin = end
    return weight, bias


def _add_linear(residual: Tensor, x: Tensor, module: Any) -> Tensor:
    """Return residual + module(x)."""
    if module.bias is not None:
        return residual + module(x)
    return torch.addmm(residual, x, module.weight.t())
