"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft.

h = W x + lora_alpha / lora_rank B A x, and only A and B are trained.

The model keeps its class, and the base its weights. A checkpoint's model files hold the merged weights, as after full
training, and beside them the adapters in peft's own form. Inference gets the merged weights, too, or the adapters alone
(`Config.sends_adapters`). Importing this module imports peft, which takes two seconds.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from clew.config import Config
from clew.errors import ModelError
from clew.models.tensor_digest import hex_digests
from clew.record.weights import DIGESTS_KEY

log = logging.getLogger("clew.training")

NAME = "default"
"""Peft's name of the only adapter."""
FILE = "adapter_model.safetensors"
EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names of layers that belonged to single experts before transformers 5.

In a model with experts, peft mistakes a layer with such a name (in a shared expert or a dense block) for the fused
tensor of all experts. The fused tensors stay frozen, and so do these layers.
"""
_PREFIX = "base_model.model."
"""Prefix of a parameter's name in a PeftModel."""


class Adapters:
    """The adapters of a model.

    The constructor adds one to every linear layer, except the output embedding and layers that peft cannot tell from
    experts, and freezes everything else. B begins with zeros, so the model computes what it did before; A is drawn with
    the configured seed.
    """

    def __init__(self, model: Any, config: Config) -> None:
        """Add adapters to `model`. Raises ModelError if it has no linear layer, or peft refuses its architecture."""
        rank, linear = config.training.lora_rank, _linear_layers(model)
        assert rank is not None, "Adapters needs training.lora_rank"
        if not linear:
            raise ModelError(
                f"Cannot add adapters: {type(model).__name__} has no suitable linear layer. Unset training.lora_rank."
            )
        self._model = model
        self._config = LoraConfig(
            r=rank,
            lora_alpha=config.training.lora_alpha or 2 * rank,  # pyright: ignore[reportArgumentType] - any number will do
            target_modules=linear,
            task_type="CAUSAL_LM",
            base_model_name_or_path=config.model.path,
        )
        with torch.random.fork_rng(), warnings.catch_warnings():
            torch.manual_seed(config.seed)
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # peft sets it for GPT-2
            try:
                inject_adapter_in_model(self._config, model)
            except ValueError as error:  # peft refuses architectures that it cannot handle
                raise ModelError(
                    f"training.lora_rank: peft cannot add adapters to {type(model).__name__}: {error}"
                ) from error

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch the adapters off inside the block, which then uses the base model."""
        for _, layer in self._layers():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for _, layer in self._layers():
                layer.enable_adapters(True)

    @torch.no_grad()
    def merged(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's state as if it had no adapters: their products are added to the weights.

        A weight whose product is zero keeps its bits.

        Args:
            state: The model's state with adapters, see `clew.training.sharding.state_of`.
        """
        merged = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if ".lora_" not in name}
        for name, layer in self._layers() if state else ():
            a, b = (state[f"{name}.lora_{each}.{NAME}.weight"] for each in "AB")
            merged[f"{name}.weight"] = _sum(layer, merged[f"{name}.weight"], a, b).contiguous()
        return merged

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Compute with the weights of `merged` inside the block, layer by layer, as inference does."""
        for _, layer in self._layers():
            layer.forward = partial(_as_merged, layer)
        try:
            yield
        finally:
            for _, layer in self._layers():
                del layer.forward

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write files that PeftModel.from_pretrained(base model, folder) reads.

        Args:
            state: The model's state, as for `merged`.
        """
        folder.mkdir(parents=True)
        self._write(folder, self._config, _named(state), {"format": "pt"})

    @torch.no_grad()
    def publish(self, folder: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write files for an inference server that adds the adapters itself.

        B is already scaled, and lora_alpha equals lora_rank. Otherwise a server would scale B when it loads it, and its
        tensors would not match the digests.

        Args:
            state: The adapters' tensors by their names in the model.
        """
        config = replace(self._config, lora_alpha=self._config.r)
        scales = {f"{_PREFIX}{name}.lora_B.weight": layer.scaling[NAME] for name, layer in self._layers()}
        tensors = {name: (tensor * scales.get(name, 1)).contiguous() for name, tensor in _named(state).items()}
        self._write(folder, config, tensors, {**metadata, DIGESTS_KEY: json.dumps(hex_digests(tensors))})

    def _write(self, folder: Path, config: LoraConfig, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> None:
        config.inference_mode = True
        config.save_pretrained(str(folder))
        save_file(tensors, folder / FILE, metadata=dict(metadata))

    def _layers(self) -> Iterator[tuple[str, Any]]:
        return ((name, each) for name, each in self._model.named_modules() if isinstance(each, LoraLayer))


def _linear_layers(model: Any) -> list[str]:
    """Return the full names of the layers that get adapters: other modules may have the same last part."""
    output = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if type(module).forward in (nn.Linear.forward, Conv1D.forward) and module is not output
    ]
    if not any(type(module).__name__.endswith("Experts") for module in model.modules()):
        return linear
    left_out = [name for name in linear if name.rpartition(".")[2] in EXPERTS]
    if left_out:
        log.warning(
            "training.lora_rank: %d linear layers of %s, such as %s, get no adapters, because peft mistakes them for "
            "experts.",
            len(left_out),
            type(model).__name__,
            min(left_out),
        )
    return [name for name in linear if name not in left_out]


def _named(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapters' tensors by peft's names."""
    return {_PREFIX + name.replace(f".{NAME}.", "."): each for name, each in state.items() if ".lora_" in name}


def _sum(layer: Any, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of a base's weight and its adapter's product."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    product = layer.scaling[NAME] * (b.to(wide) @ a.to(wide))
    product = product.T if getattr(layer, "fan_in_fan_out", False) else product
    return torch.where(product == 0, weight, (weight + product).to(weight.dtype))


def _as_merged(layer: Any, x: Tensor) -> Tensor:
    base = layer.base_layer
    weight = _sum(layer, base.weight, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight)
    return torch.func.functional_call(base, {"weight": weight}, (x,))


def read_adapters(folder: Path) -> dict[str, Tensor]:
    """Return the tensors that `Adapters.save` wrote, by their names in the model. Raises OSError or SafetensorError."""
    tensors = load_file(folder / FILE)
    return {
        name.removeprefix(_PREFIX).removesuffix("weight") + f"{NAME}.weight": tensor for name, tensor in tensors.items()
    }
