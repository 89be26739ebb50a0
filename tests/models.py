"""Tiny random models and a character tokenizer, written as save_pretrained writes them."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
SPECIAL = ("<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>")
VOCAB = len(SPECIAL) + len(CHARACTERS)
"""Size of the tokenizer's vocabulary: a token a character."""

ATTENTION_FAMILIES = ("qwen2", "qwen3", "llama", "gpt2", "gemma2", "gemma3", "mistral")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(folder: Path | str, chat: bool = True) -> PreTrainedTokenizerFast:
    """A token a character; ids 0 (pad) and 1 (end) are special."""
    tokens = [*SPECIAL, *CHARACTERS]
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
        clean_up_tokenization_spaces=False,
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(folder))
    return fast


def tiny_model(
    folder: Path | str,
    family: str = "qwen2",
    *,
    vocab: int = VOCAB,
    tie: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    hidden: int = 32,
    layers: int = 2,
    context: int = 256,
    scale: float = 0.4,
) -> PreTrainedModel:
    """A random model whose next-token distributions are far from flat.

    family: one of ATTENTION_FAMILIES, or "gpt_neox", "qwen3_moe", "mixtral", "mamba".
    scale: standard deviation of the initial weights.
    The models with sliding layers have a window of 8, so that short tests pass its edge.
    """
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "tie_word_embeddings": tie,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "initializer_range": scale,
    }
    if family == "gpt2":
        shape = {"n_embd": hidden, "n_layer": layers, "n_head": 4, "n_positions": context}
    elif family == "gpt_neox":
        shape = {
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "max_position_embeddings": context,
        }
    elif family == "mamba":
        shape = {"hidden_size": hidden, "num_hidden_layers": layers, "state_size": 8, "conv_kernel": 4}
    else:
        shape = {
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": context,
        }
        if family not in ("qwen2",):
            shape["head_dim"] = hidden // 4
        if family in ("gemma2", "gemma3", "mistral"):
            shape["sliding_window"] = 8
        if family == "qwen3_moe":
            shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
        if family == "mixtral":
            shape |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        if family == "gemma3":
            shape["sliding_window_pattern"] = 2
    model_type = "gemma3_text" if family == "gemma3" else family
    config = AutoConfig.for_model(model_type, **common, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config).to(dtype).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" not in name and "ln_" not in name:
                torch.nn.init.normal_(parameter, std=scale)  # biases: zeros would hide a mistake
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 0
    model.save_pretrained(str(folder))
    return model
