"""Sharding of a model over several ranks: each holds a slice of every parameter, gradient and optimizer moment (FSDP2).

PyTorch FSDP2: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. Before a block computes, its
parameters are gathered; after its backward pass the gradients are summed over the ranks, and each keeps its slice.

With `training.tp`, consecutive ranks split each block among themselves (`clew.training.tensor_parallel`). Each part is
gathered from the ranks that hold a slice of it:

::

    4 ranks, tp 2      rank 0   rank 1      rank 2   rank 3
    micro-batch           0        0           1        1
    a linear layer      left     right       left     right     halves: left over ranks 0 and 2, right over 1 and 3
    a norm              whole    whole       whole    whole     halves: over 0 and 2, and once more over 1 and 3
    embeddings, head    whole    whole       whole    whole     quarters: over all
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

from clew.config import Training
from clew.errors import ModelError
from clew.training.attention import checkpoint_contexts
from clew.training.isolation import check_causal, prepare_for_packing
from clew.training.ranks import Ranks
from clew.training.tensor_parallel import split


def prepare_for_training(
    model: Any, training: Training, ranks: Ranks, device: torch.device, *, root: torch.nn.Module | None = None
) -> None:
    """Prepare a newly loaded transformers model for training as `training` asks, and `shard` it over all ranks.

    Raises:
        ModelError: The model cannot be trained at all.
    """
    check_causal(model)
    prepare_for_packing(model)
    if training.activation_checkpointing:
        checkpoint_activations(blocks_of(model))
    shard(model, ranks, device, root=root)


def checkpoint_activations(blocks: Iterable[torch.nn.Module]) -> None:
    """Make each block keep only its inputs, and compute the rest again in the backward pass (arXiv 1604.06174)."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=checkpoint_contexts)


def shard(model: Any, ranks: Ranks, device: torch.device, *, root: torch.nn.Module | None = None) -> None:
    """Shard a model's parameters over the ranks, block by block, with each rank's slices on its device.

    Does nothing with a single rank. Gradients are summed, not averaged: a loss is divided by the number of tokens of
    all ranks together. bfloat16 gradients are summed in float32.

    Args:
        root: Module that holds the model and is called in its place; None: the model itself.

    Raises:
        ModelError: Parameters that are sharded together have different dtypes, which FSDP2 does not take.
    """
    if ranks.size == 1:
        return
    blocks, outermost = blocks_of(model), root or model
    _check_dtypes([*blocks, outermost])
    mesh = DeviceMesh(device.type, list(range(ranks.size)))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if model.dtype == torch.bfloat16 else None)
    with nullcontext(mesh) if ranks.tp == 1 else split(model, blocks, ranks, device, root=root) as mesh_of_blocks:
        for block in blocks:
            fully_shard(block, mesh=mesh_of_blocks, mp_policy=policy)
        # Without `root`, logits are projected after the forward pass: outer parameters stay gathered.
        fully_shard(outermost, mesh=mesh, mp_policy=policy, reshard_after_forward=root is not None)
        for module in outermost.modules():
            if isinstance(module, FSDPModule):
                # Outside the blocks, all tp ranks of a group compute the same gradient, so divide the sum by tp.
                module.set_gradient_divide_factor(float(ranks.tp) if module is outermost else 1.0)
                module.set_force_sum_reduction_for_comms(True)  # needed for gloo; NCCL gives the same sum


def _check_dtypes(modules: Iterable[torch.nn.Module]) -> None:
    """Raise ModelError if one of the modules trains parameters of several dtypes, besides those of earlier modules."""
    seen = set[torch.nn.Parameter]()
    for module in modules:
        trained = {name: each for name, each in module.named_parameters() if each.requires_grad and each not in seen}
        seen.update(trained.values())
        names = {each.dtype: name for name, each in trained.items()}
        if len(names) > 1:
            found = ", ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for dtype, name in names.items())
            raise ModelError(
                f"Cannot shard this model over several ranks: its parameters have different dtypes ({found}), which "
                f"FSDP2 does not take. Use model.dtype=float32, training.lora_rank, or a single rank."
            )


def blocks_of(model: Any) -> list[torch.nn.Module]:
    """Return the decoder's blocks: the modules that transformers says must not be split.

    They are never nested. For Mamba, transformers names both the blocks and the mixers in them; only the blocks are
    returned.
    """
    names = set(model._no_split_modules or ())
    blocks: list[torch.nn.Module] = []
    within: set[torch.nn.Module] = set()
    for module in model.modules():
        if type(module).__name__ in names and module not in within:
            blocks.append(module)
            within.update(module.modules())
    return blocks


def slice_of(tensor: Tensor, ranks: Ranks) -> tuple[Tensor, int] | None:
    """Return the part of a tensor that this rank is responsible for, and its flat position in the whole tensor.

    None means that other ranks are responsible for all of it. Rank 0 is responsible for tensors that every rank has
    as a whole. All ranks must call this together.
    """
    if not isinstance(tensor, DTensor):
        return (tensor, 0) if ranks.leads else None
    if tensor.device_mesh.size() < ranks.size and ranks.tp_rank:
        return None  # the same slices are on the first rank of each group
    if any(each.is_replicate() or each.dim for each in tensor.placements):  # pyright: ignore[reportAttributeAccessIssue]
        # Shard by rows, with each row on one rank; in two steps, because gloo has no all-to-all.
        tensor = tensor.redistribute(placements=[Shard(0), Replicate()])
        tensor = tensor.redistribute(placements=[Shard(0), Shard(0)])
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), offsets[0] * math.prod(tensor.shape[1:])


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors grouped by the ranks over which they are sharded. torch accepts only one group per call."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor. All ranks must call this together."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for dim in range(len(placements)):  # one at a time: for all of them at once, DTensor does the same, but warns
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def collect(named: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return each tensor as a whole, in host memory, on rank 0; an empty dictionary on other ranks.

    A tensor under several names stays one tensor. All ranks must call this together.
    """
    wholes: dict[int, Tensor] = {}
    for tensor in named.values():
        if id(tensor) not in wholes:
            full = full_tensor(tensor)
            wholes[id(tensor)] = full.cpu().contiguous() if ranks.leads else torch.empty(0)
    return {name: wholes[id(tensor)] for name, tensor in named.items()} if ranks.leads else {}


def each_once(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without aliases: a tied tensor keeps only the first of its names."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in state.items():
        first.setdefault(id(tensor), (name, tensor))
    return dict(first.values())


def like(tensor: Tensor, full: Tensor) -> Tensor:
    """Return `full` on the device of `tensor` and sharded like it. Every rank must have `full`; nothing is sent."""
    full = full.to(tensor.device)
    if not isinstance(tensor, DTensor):
        return full
    return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)


def state_of(model: torch.nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers, as `collect` does."""
    return collect(model.state_dict(keep_vars=True), ranks)
