"""Tiny random models and a character tokenizer, written as save_pretrained writes them."""

from __future__ import annotations

import io
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
SPECIAL = ("<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>")
VOCAB = len(SPECIAL) + len(CHARACTERS)
"""Size of the tokenizer's vocabulary: a token a character."""

ATTENTION_FAMILIES = ("qwen2", "qwen3", "llama", "gpt2", "gemma2", "gemma3", "gemma4", "mistral", "gpt_oss", "nemotron")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(folder: Path | str, chat: bool = True, size: int = VOCAB) -> PreTrainedTokenizerFast:
    """A token a character; ids 0 (pad) and 1 (end) are special; a larger size adds hexadecimal numbers."""
    tokens = [*SPECIAL, *CHARACTERS, *(f"{number:05x}" for number in range(VOCAB, size))]
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
    more: Mapping[str, Any] = {},
) -> PreTrainedModel:
    """A random model whose next-token distributions are far from flat.

    family: one of ATTENTION_FAMILIES, or "gpt_neox", "qwen2_moe", "qwen3_moe", "mixtral", "mamba".
    scale: standard deviation of the initial weights.   more: fields of its configuration.
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
        if family in ("gemma2", "gemma3", "gemma4", "mistral", "gpt_oss"):
            shape["sliding_window"] = 8
        if family in ("qwen2_moe", "qwen3_moe"):
            shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
        if family == "qwen2_moe":
            shape["shared_expert_intermediate_size"] = hidden
        if family in ("mixtral", "gpt_oss"):
            shape |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        if family == "gemma3":
            shape["sliding_window_pattern"] = 2
        if family == "gemma4":  # the last half of the layers shares the keys of the first
            shape |= {"layer_types": ["sliding_attention", "full_attention"] * layers, "num_hidden_layers": 2 * layers}
            shape |= {"num_kv_shared_layers": layers, "global_head_dim": hidden // 2}
            shape |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": vocab}
    model_type = f"{family}_text" if family in ("gemma3", "gemma4") else family
    config = AutoConfig.for_model(model_type, **{**common, **shape, **more})
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


SEEING_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def seeing_model(
    folder: Path | str, family: str = "llava", *, scale: float = 0.3, context: int = 256, head: int = 8
) -> Any:
    """A random model that takes images, with its tokenizer and processor; returns its processor.

    head: size of the attention's heads, of which there are four; vLLM's CPU attention takes 32 and more.

    family: llava (4 tokens an image of any size), paddleocr_vl (a token for each 8 x 8 pixels, with positions in two
    dimensions, as Qwen's have), gemma3 (whose tokens of an image see one another).
    """
    tokens = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    base = tiny_tokenizer(folder)
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=base._tokenizer,  # pyright: ignore[reportAttributeAccessIssue]
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        bos_token="<eos>" if family == "gemma3" else None,
        extra_special_tokens=tokens,
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
        clean_up_tokenization_spaces=False,
        chat_template=SEEING_TEMPLATE,
    )
    if family == "gemma3":  # the real one has a token for each of these, too
        tokenizer.add_tokens([AddedToken("\n" * count, normalized=False) for count in (2, 3, 4)])
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "hidden_size": 4 * head,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head,
        "max_position_embeddings": context,
    }
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    processor = _PROCESSORS[family](tokenizer, text, vision)
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, **_configured(family, ids))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = AutoModelForImageTextToText.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name:
                torch.nn.init.normal_(parameter, std=scale)
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 0
    model.save_pretrained(str(folder))
    processor.save_pretrained(str(folder))
    return processor


def _configured(family: str, ids: dict[str, int]) -> dict[str, Any]:
    if family == "llava":
        return {
            "image_token_index": ids["image_token"],
            "vision_feature_select_strategy": "default",
            "vision_feature_layer": -1,
        }
    if family == "gemma3":
        return {
            "image_token_index": ids["image_token"],
            "boi_token_index": ids["boi_token"],
            "eoi_token_index": ids["eoi_token"],
            "mm_tokens_per_image": 4,
        }
    return {
        "image_token_id": ids["image_token"],
        "video_token_id": 990,
        "vision_start_token_id": 991,
        "vision_end_token_id": 992,
    }


def _llava(tokenizer: Any, text: dict[str, Any], vision: dict[str, Any]) -> Any:
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    text["model_type"] = "qwen2"
    vision |= {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8}
    images = LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    given = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, tokenizer, patch_size=8, chat_template=SEEING_TEMPLATE, **given)


def _paddle(tokenizer: Any, text: dict[str, Any], vision: dict[str, Any]) -> Any:
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
    from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision |= {"image_size": 32, "patch_size": 4}
    images = PaddleOCRVLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=1, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    return PaddleOCRVLProcessor(images, tokenizer, chat_template=SEEING_TEMPLATE)


def _gemma(tokenizer: Any, text: dict[str, Any], vision: dict[str, Any]) -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    text |= {"layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 8}
    vision |= {"image_size": 16, "patch_size": 4}
    template = SEEING_TEMPLATE.replace("<image>", "<boi>")
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template)


_PROCESSORS = {"llava": _llava, "paddleocr_vl": _paddle, "gemma3": _gemma}


def picture(color: str, width: int = 24, height: int = 16) -> bytes:
    """A PNG file."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()
