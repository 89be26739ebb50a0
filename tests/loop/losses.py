"""Losses of whole runs."""

from __future__ import annotations

import gc
from typing import Any

import torch

from clew.inference.embedded import EmbeddedEngine

cache_bytes: list[int] = []
"""Bytes that the engines of this process held as caches, each time `watching` was computed; clear it before a run."""

_engines: list[EmbeddedEngine] = []


def watching(logprobs_N: torch.Tensor, advantages_N: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """REINFORCE, and a look at the memory."""
    if not cache_bytes:
        _engines.clear()
        gc.collect()
        _engines.extend(each for each in gc.get_objects() if type(each) is EmbeddedEngine)
    cache_bytes.append(sum(engine.cache_bytes() for engine in _engines))
    return -advantages_N * logprobs_N, {}
