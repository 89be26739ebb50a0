"""The model that answers in a stress: a served model, a provider, or a stand-in."""

from __future__ import annotations

import asyncio
from pathlib import Path

from clew.config import provider
from clew.errors import RecordError
from clew.inference.detection import find_engine
from clew.models.loading import load_tokenizer
from clew.models.vision import load_vision
from clew.record.run import open_run
from clew.stress.on_gateway import BeforeEngine, BeforeProvider, Gateway
from clew.stress.standin import Names, StandIn, byte_tokenizer

RECORDED = 4096
"""Maximum number of answers taken from a run."""


def answerer(
    base_url: str | None, *, latency_s: float, tokens: int, recorded: Path | None, model: str | None
) -> Gateway:
    """Return the gateway in front of the model that answers.

    Args:
        base_url: A server that takes token IDs, or a provider. None: a stand-in answers.
        latency_s: Minimum seconds that an answer of the stand-in takes.
        tokens: Maximum length of a synthetic answer of the stand-in.
        recorded: A run from whose completions the stand-in chooses its answers. None: the answers are synthetic.
        model: The model whose tokenizer and image processing the stand-in uses. None: one token per byte.

    Raises:
        EngineError: If nothing usable answers at `base_url`.
        ModelError: If the model's files cannot be loaded.
        RecordError: If `recorded` cannot be read or has no completions.
    """
    if base_url is not None:
        api_key = provider()[1]
        found = asyncio.run(find_engine(base_url, api_key))
        if found is None:
            return BeforeProvider(base_url, api_key)
        sight = load_vision(found.model) if found.takes_images else None
        return BeforeEngine(found.engine, load_tokenizer(found.model), sight, found.engine.close)
    tokenizer = load_tokenizer(model) if model is not None else byte_tokenizer()
    vision = load_vision(model) if model is not None else Names()
    texts = _answers(recorded) if recorded is not None else []
    return BeforeEngine(StandIn(tokenizer, latency_s=latency_s, tokens=tokens, texts=texts), tokenizer, vision)


def _answers(path: Path) -> list[str]:
    """Return the model's answers in a run: the raw text of its completions."""
    run = open_run(path)
    found: list[str] = []
    for step in range(run.steps.count()):
        if run.steps.has_data(step):
            found += [str(said["completion"]) for row in run.steps.read_data(step) for said in row.interactions]
        if len(found) >= RECORDED:
            return found[:RECORDED]
    if not found:
        raise RecordError(f"{path} has no recorded completions. Name a run that has committed a step.")
    return found
