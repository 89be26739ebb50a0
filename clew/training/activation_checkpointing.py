"""Activation checkpointing (`training.activation_checkpointing`): it saves memory, and costs a second forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from clew.training.attention import checkpoint_contexts


def checkpoint_activations(blocks: Iterable[torch.nn.Module]) -> None:
    """Make each block keep only its inputs, and compute the rest again in the backward pass (arXiv 1604.06174)."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=checkpoint_contexts)
