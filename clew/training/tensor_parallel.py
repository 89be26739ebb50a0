"""Tensor parallelism (arXiv 1909.08053): the ranks of a group split the model's blocks among them.

They compute the same tokens, each with its share of the attention's heads and of the MLP's width, and sum their
results.

transformers' plan for an architecture (`tp_plan`) says what is split and how; torch's DTensor does it. Embeddings and
output head lie outside the blocks and are not split: FSDP2 shards them over all ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from clew.errors import ModelError
from clew.models.architecture import context_in
from clew.training.ranks import Ranks
from clew.training.scoring import score

STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    # Norms per head: a rank has only some heads, so the weight's gradient is a sum over ranks, as for a split sequence.
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=0, use_local_output=True),
}
"""Way to split a module, by transformers' name for it."""

HEADS = ("num_attention_heads", "num_key_value_heads")
"""Names of the numbers of heads in transformers' configurations."""

TOKENS = 16
"""Number of tokens on which a model is tried before and after it is split."""
SPLIT_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest allowed relative difference, by dtype: between the outputs of the whole and the split model's last block, and
between the gradients that two ranks compute for one parameter."""


@contextmanager
def split(
    model: Any, blocks: list[nn.Module], ranks: Ranks, device: torch.device, *, root: nn.Module | None
) -> Iterator[DeviceMesh]:
    """Make each rank of a group keep and compute its share of every block, on its device.

    Every rank must have the whole model. Inside the `with` block, the caller shards the model's blocks over the yielded
    mesh: the ranks with the same share. When the block ends, the split model is compared with the whole one.

    Args:
        blocks: The model's transformer blocks.
        device: Device that the split modules are moved to.
        root: Module that holds the model and is called in its place; None: the model itself.

    Raises:
        ModelError: The model has no usable plan, or gives different results when it is split.
    """
    planned = check_plan(model, blocks, ranks.tp)
    trained = any(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        whole_BTD = _try_out(model, blocks, root)
    mesh = _mesh(device.type, ranks.dp_size, ranks.tp)
    for name, style in planned.items():
        parallelize_module(model.get_submodule(name).to(device), mesh["tp"], STYLES[style])
    yield mesh["fsdp"]
    with torch.set_grad_enabled(trained):
        split_BTD = _try_out(model, blocks, root)
    _check_outputs(model, whole_BTD, split_BTD)
    if trained:
        _check_gradients(model, mesh, ranks)


@cache
def _mesh(device_type: str, dp: int, tp: int) -> DeviceMesh:
    """Return the mesh: "fsdp" counts groups, "tp" the ranks within one.

    All models use this one, because each mesh opens connections.
    """
    mesh = init_device_mesh(device_type, (dp, tp), mesh_dim_names=("fsdp", "tp"))
    mesh._flatten()  # so that the gradients' norm is summed over both at once
    return mesh


def check_plan(model: Any, blocks: list[nn.Module], tp: int) -> dict[str, str]:
    """Return the style of each module in the blocks that the model's plan names.

    Raises:
        ModelError: transformers has no plan for this architecture, or one with unsupported styles, or `tp` does not
            divide a number of heads or another width.
    """
    kind, refused = type(model).__name__, f"Cannot use training.tp={tp}"
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    inside = {id(each) for block in blocks for each in (*block.modules(), *block.parameters())}
    named = [*model.named_modules(), *model.named_parameters()]
    planned = {
        name: (each, style)
        for name, each in named
        if id(each) in inside and (style := plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)))
    }
    if not planned:
        raise ModelError(
            f"{refused}: transformers has no tensor-parallel plan (tp_plan) for {kind}. Use training.tp=1: FSDP2 "
            f"spreads any model over launch.ranks."
        )
    widths = _numbers_of_heads(model)
    for name, (each, style) in planned.items():
        is_linear = isinstance(each, nn.Linear)
        if style not in STYLES or not (is_linear or style == "replicated_with_grad_allreduce"):
            raise ModelError(
                f"{refused}: the plan of {kind} splits {name} ({type(each).__name__}) as {style!r}, which Clew does "
                f"not support; it splits linear layers ({', '.join(STYLES)}). Use training.tp=1."
            )
        if is_linear:
            side = "out_features" if style.startswith("colwise") else "in_features"
            widths.append((f"{side} of {name}", getattr(each, side)))
    for what, width in widths:
        if width % tp:
            raise ModelError(
                f"{refused}: {kind} has {what}={width}, which {tp} ranks cannot share evenly. Use training.tp="
                f"{math.gcd(tp, *(width for _, width in widths))}."
            )
    return {name: style for name, (_, style) in planned.items()}


def _numbers_of_heads(model: Any) -> list[tuple[str, int]]:
    """Return each number of heads in a model's configuration, with its name."""
    config = model.config.get_text_config()
    layers = getattr(config, "per_layer_config", None) or [config]  # Gemma 4's layers differ in their numbers of heads
    numbers = {(name, getattr(layer, name, None)) for layer in layers for name in HEADS}
    return sorted((name, number) for name, number in numbers if isinstance(number, int))


def _try_out(model: Any, blocks: list[nn.Module], root: nn.Module | None) -> Tensor:
    """Run a model on a row of T tokens, and return the output of its last block, [1, T, D], on the CPU.

    If gradients are enabled, each parameter gets its gradient of the mean square of this output.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    length = min(TOKENS, context_in(model.config)[0] or TOKENS)
    ids_BT = 7919 * torch.arange(1, length + 1, device=model.device)[None] % vocabulary
    columns_N = torch.arange(1, length, device=model.device)
    rows_N = torch.zeros_like(columns_N)
    seen: list[Any] = []
    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(lambda _module, _inputs, output: seen.append(output)))
        numbers_N = (
            score(model, ids_BT, rows_N, columns_N).logprobs_N if root is None else root(ids_BT, rows_N, columns_N)
        )
    output_BTD = seen[-1] if isinstance(seen[-1], Tensor) else seen[-1][0]
    if torch.is_grad_enabled():
        (output_BTD.square().mean() + 0 * numbers_N.sum()).backward()
    return output_BTD.detach().cpu().double()


def _check_outputs(model: Any, whole_BTD: Tensor, split_BTD: Tensor) -> None:
    """Raise ModelError when a split model's output (from `_try_out`) is not that of the whole model."""
    difference = float((split_BTD - whole_BTD).norm() / whole_BTD.norm())
    if not difference <= SPLIT_TOLERANCES[model.dtype]:  # NaN too
        raise ModelError(
            f"training.tp: {type(model).__name__}, split as transformers plans it (tp_plan), gives other results than "
            f"the whole model: its last block's output differs by {difference:.1%}. Use training.tp=1."
        )


def _check_gradients(model: Any, mesh: DeviceMesh, ranks: Ranks) -> None:
    """Raise ModelError when the ranks of a group got different gradients for a parameter that is not split among them.

    The plan is incomplete then. Only a trial can tell, because this depends on all of an architecture's code.
    """
    tolerance, differing = SPLIT_TOLERANCES[model.dtype], list[str]()
    for name, parameter in model.named_parameters():
        gradient, parameter.grad = parameter.grad, None
        if isinstance(gradient, DTensor) and gradient.device_mesh == mesh["fsdp"] and gradient.to_local().numel():
            local = gradient.to_local().float()
            bounds = torch.stack([local, -local])
            dist.all_reduce(bounds, dist.ReduceOp.MAX, mesh.get_group("tp"))
            if not float(bounds.sum(0).max()) <= tolerance * float(bounds.max()):
                differing.append(name)
    if names := next(filter(None, ranks.gather(differing)), None):
        raise ModelError(
            f"training.tp: {type(model).__name__}, split as transformers plans it (tp_plan), gets different gradients "
            f"of {names[0]} on different ranks, although each rank holds the whole parameter: the plan is incomplete. "
            f"Use training.tp=1."
        )
