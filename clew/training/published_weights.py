"""Publishing of weights from the trainer to inference."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import save_file

from clew.errors import TrainingError
from clew.models.architecture import context_in
from clew.models.tensor_digest import hex_digests
from clew.record.files import write_json
from clew.record.weights import BROADCAST_FILE, DIGEST_KEY, DIGESTS_KEY, BroadcastDigests, WeightRef
from clew.training.engine import TrainEngine
from clew.training.saving import written_aside
from clew.training.scoring import score
from clew.training.sharding import collect, each_once

PROBE_TOKENS = 32
"""Length of the sequence that is scored after each load."""
PROBE_ROOM = 8
"""Number of tokens that the probe leaves free in the model's context; engines refuse a request that fills it."""


def write_weights(engine: TrainEngine, folder: Path, version: int, sent: BroadcastDigests | None = None) -> WeightRef:
    """Write the policy's weights in the type that inference computes with.

    Every rank calls this at once; rank 0 writes. Only one of several tied tensors is written. If only adapters are sent
    (`Config.sends_adapters`), only they are written, in peft's form.

    For Clew's own engine, tensors keep their names in memory, because its model has the same class as the policy. For
    vLLM and SGLang they get the names of published models, which differ for mixtures of experts, for example.

    Args:
        folder: Folder to write. It appears all at once, by a rename; an existing one is replaced.
        sent: Digests of the weights, written in their place if they were broadcast; None: they were not.

    Raises:
        TrainingError: The tensors to send are not those that the model computes with.
    """
    adapters = engine.policy.adapters if engine.config.sends_adapters else None
    digest = engine.weights_digest()
    tensors: dict[str, torch.Tensor] = {}  # stays empty after a broadcast
    if sent is None and adapters is None:
        tensors = each_once(engine.policy.published_state())
    elif sent is None:
        tensors = collect(dict(engine.policy.parameters(trained=True)), engine.ranks)
    if engine.ranks.leads:
        with written_aside(folder) as aside:
            metadata = {"format": "pt", DIGEST_KEY: digest}
            if sent is not None or engine.config.inference.backend != "embedded":
                digests = hex_digests(tensors) if sent is None else sent["digests"]
                _check_sent(engine, digests, version)
                if adapters is None and (public := public_tensors(engine, tensors)).keys() != tensors.keys():
                    tensors, digests = public, hex_digests(public)
                metadata[DIGESTS_KEY] = json.dumps(digests)
            if sent is not None:
                write_json(aside / BROADCAST_FILE, sent)
            elif adapters is not None:
                adapters.publish(aside, tensors, metadata)
            else:
                save_file(tensors, aside / "model.safetensors", metadata=metadata)
                engine.policy.model.config.save_pretrained(aside)
    probe, logprob = _probe(engine)
    return WeightRef(
        version=version, path=str(folder.absolute()), digest=digest, probe_ids=probe, probe_logprob=logprob
    )


def public_tensors(engine: TrainEngine, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors under the names and in the shapes of published models, which vLLM and SGLang load."""
    from transformers.core_model_loading import revert_weight_conversion  # in memory, a layer's experts are joined

    public = revert_weight_conversion(engine.policy.model, dict(tensors))
    return {name: tensor.contiguous() for name, tensor in public.items()}


def _check_sent(engine: TrainEngine, digests: dict[str, str], version: int) -> None:
    """Raise TrainingError if tensors that are sent are not those that the model computes with.

    Engines compare what they hold with what was sent. If an old copy was sent, only this check notices: the engines
    would serve old weights, which would look like lag. If a step changed no weight (after rounding), an old one passes.
    """
    own = engine.weights_digests()
    other = [name for name, digest in digests.items() if name in own and int(digest, 16) != own[name]]
    if other:
        raise TrainingError(
            f"Cannot publish version {version}: {len(other)} of {len(digests)} tensors to send are not those that the "
            f"model computes with, such as {other[0]}. An older version would be served. This is a defect of Clew."
        )


@torch.no_grad()
def _probe(engine: TrainEngine) -> tuple[list[int], float]:
    """Return the probe, and the logprob of its last token under the published weights, at temperature 1.

    Its tokens are spread over the vocabulary, and the same for every version of a model; fewer for a short context.
    """
    model, device, length = engine.policy.model, engine.policy.device, PROBE_TOKENS
    if context := context_in(model.config)[0]:  # vLLM 0.32 wants room for one more token, SGLang 0.5.23 for six
        length = max(2, min(length, context - PROBE_ROOM))
    probe = [7919 * (i + 1) % model.config.get_text_config().vocab_size for i in range(length)]
    row_N, column_N = torch.tensor([[0], [length - 1]], device=device)
    adapters = None if engine.config.sends_adapters else engine.policy.adapters
    with nullcontext() if adapters is None else adapters.rounded():
        scores = score(model, torch.tensor([probe], device=device), row_N, column_N, torch.ones(1, device=device))
    return probe, float(scores.logprobs_N)
