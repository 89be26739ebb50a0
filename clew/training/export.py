"""Publishing of weights from the trainer to inference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import save_file

from clew.models.tensor_digest import digest_tensor
from clew.record.weights import DIGEST_KEY, DIGESTS_KEY, WeightRef
from clew.training.engine import TrainEngine
from clew.training.folders import written_aside
from clew.training.scoring import score

PROBE_TOKENS = 32
"""Length of the sequence that is scored after each load."""


def write_weights(engine: TrainEngine, folder: Path, version: int, probe_ids: Sequence[int] | None = None) -> WeightRef:
    """Write the policy's weights in the type that inference computes with, under the names that they have in memory.

    `save_pretrained` uses other names for some architectures (mixtures of experts, GPT-NeoX). The inference engine's
    model has the same class as the policy and does not know them. Of tied tensors, one is written. Every rank calls
    this at once; rank 0 writes.

    Args:
        folder: Folder to write. It appears all at once, by a rename; an existing one is replaced.
        probe_ids: Token IDs to score, at least two; None: `default_probe`.

    Raises:
        RecordError: The disk is full.
    """
    probe = list(default_probe(engine) if probe_ids is None else probe_ids)
    tensors, digest = _each_once(engine.policy.published_state()), engine.weights_digest()
    if engine.ranks.leads:
        with written_aside(folder) as aside:
            metadata = {"format": "pt", DIGEST_KEY: digest}
            if engine.config.inference.backend != "embedded":
                metadata[DIGESTS_KEY] = json.dumps(_digests(tensors))
            save_file(tensors, aside / "model.safetensors", metadata=metadata)
            engine.policy.model.config.save_pretrained(aside)
    return WeightRef(
        version=version,
        path=str(folder),
        digest=digest,
        probe_ids=probe,
        probe_logprob=probe_logprob(engine, probe),
    )


def _each_once(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors, with only one of those that share memory."""
    found = {tensor.data_ptr(): (name, tensor) for name, tensor in reversed(state.items())}
    return {name: tensor.contiguous() for name, tensor in reversed(found.values())}


def _digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{digest_tensor(tensor, name=name):016x}" for name, tensor in tensors.items()}


def default_probe(engine: TrainEngine) -> list[int]:
    """Return token IDs spread over the vocabulary, the same for every version of a model; fewer for a short context."""
    length = min(PROBE_TOKENS, engine.policy.context or PROBE_TOKENS)
    return [7919 * (i + 1) % engine.policy.model.config.get_text_config().vocab_size for i in range(length)]


@torch.no_grad()
def probe_logprob(engine: TrainEngine, probe_ids: Sequence[int]) -> float:
    """Return the logprob of the last token given those before it, at temperature 1, under the weights that are
    published."""
    ids_BT = torch.tensor([probe_ids], device=engine.policy.device)
    row_N, column_N = torch.tensor([[0], [len(probe_ids) - 1]], device=engine.policy.device)
    ones_N = torch.ones(1, device=engine.policy.device)
    with nullcontext() if engine.policy.adapters is None else engine.policy.adapters.rounded():
        return float(score(engine.policy.model, ids_BT, row_N, column_N, ones_N).logprobs_N)
