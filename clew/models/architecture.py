"""Limits and abilities of an architecture, read from its configuration: context, positions, width, images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from clew.models.model_folder import config_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def image_support(path: str) -> Literal["no", "perhaps", "always"]:
    """Return whether the causal language model in a folder or on the hub takes images.

    Returns:
        "always"; "perhaps" if it does so only when an image processor is stored with it; or "no". It is also "no" if
        the architecture has a separate language model without images, because Clew then loads that one.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind: Any = type(config_of(path))
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return "no"
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "always"
    return "perhaps" if MODEL_FOR_CAUSAL_LM_MAPPING[kind] is MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind] else "no"


def width_of(model: PreTrainedModel) -> int:
    """Return the hidden size of a model; 1 if its configuration does not say."""
    return getattr(model.config.get_text_config(), "hidden_size", None) or 1


def context_of(path: str) -> int | None:
    """Return the context length, in tokens, of the model in a folder or on the hub; None if it is unknown."""
    config = config_of(path)
    return None if config is None else context_in(config)[0]


def context_in(config: PreTrainedConfig) -> tuple[int | None, str]:
    """Return the context length, in tokens, of a model (None if it is not stated), and the field that states it.

    With longrope (arXiv 2402.13753), this is the length that its positions were first made for. Beyond it, transformers
    computes every position differently, also those of shorter rows in the same batch.
    """
    limits: list[tuple[int, str]] = []
    if (context := getattr(config.get_text_config(), "max_position_embeddings", None)) is not None:
        limits.append((int(context), "max_position_embeddings"))
    for each in _ropes(config):
        first = each.get("original_max_position_embeddings")
        if each.get("rope_type") == "longrope" and first is not None:
            limits.append((int(first), "original_max_position_embeddings of longrope"))
    return min(limits, default=(None, ""))


def positions_go_on(config: PreTrainedConfig) -> bool:
    """Return whether a model can compute sequences longer than its context.

    It can if its rotary positions do not depend on the length of the sequence.
    """
    kinds = [each.get("rope_type") for each in _ropes(config)]
    return bool(kinds) and not {"longrope", "dynamic"} & {*kinds}


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the rotary parameters; several if kinds of layers have their own."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]
