"""A rank for tests: reads requests from its input, a line of JSON each, trains, and files what came of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clew.config import Config
from clew.errors import ModelError
from clew.record.media import Media
from clew.record.rows import ALIGNED, Sequence
from clew.record.writer import UNTRAINED
from clew.training import checkpoint, scoring
from clew.training.engine import TrainEngine
from clew.training.published_weights import write_weights
from clew.training.ranks import Ranks
from clew.training.sharding import state_of
from tests.models import picture
from tests.training.sequences import make_batch, make_config


def work(request: dict[str, Any], ranks: Ranks) -> None:
    """request: model, options (of make_config), batch (of make_batch), steps, out; supervised, load, save, publish;
    untrained: a group; refused: the model is; logits: number held; media: folder of images that some rows show."""
    config = make_config(Path(request["model"]), **request["options"])
    if "refused" in request:
        return _file(request, ranks, [{"refused": _refusal(config, ranks)}], {})
    media = Media(Path(request["media"])) if "media" in request else None
    engine = TrainEngine(config, ranks=ranks, media=media, supervised=request.get("supervised", False))
    if "load" in request:
        checkpoint.load(engine, Path(request["load"]))
    said: list[dict[str, Any]] = []
    for _ in range(request["steps"]):
        batch = make_batch(seed=engine.version, **request["batch"])
        if "untrained" in request:
            none = {row.id: np.zeros_like(row.loss_mask) for row in batch if row.group_id == request["untrained"]}
            batch = [replace(row, loss_mask=none.get(row.id, row.loss_mask)) for row in batch]
        if media is not None:
            batch = [show(row, engine, media) if row.id.endswith("e0.s0") else row for row in batch]
        done = engine.train_step(batch)
        said.append({"metrics": done.metrics, "digests": done.digests, "plan": done.plan})
    if "save" in request:
        checkpoint.save(engine, Path(request["save"]))
    if "publish" in request:
        write_weights(engine, Path(request["publish"]), engine.version)
    weights = state_of(engine.policy.model, ranks)
    everyone = ranks.gather([each["digests"] for each in said])
    assert all(each == everyone[0] for each in everyone), "the ranks disagree"
    _file(request, ranks, said, weights)


def show(row: Sequence, engine: TrainEngine, media: Media) -> Sequence:
    """Return the sequence with an image before its first token."""
    image = picture("red")
    assert engine.policy.vision is not None
    shown = np.array(engine.policy.vision.tokens_of(image), np.int32)
    before = {"input_ids": shown, **{name: np.full(len(shown), fill) for name, fill in UNTRAINED.items()}}
    aligned = {
        name: np.concatenate([before[name], getattr(row, name)]).astype(dtype) for name, dtype in ALIGNED.items()
    }
    return replace(row, images=[media.put(image)], **aligned)


def _refusal(config: Config, ranks: Ranks) -> str:
    try:
        TrainEngine(config, ranks=ranks)
    except ModelError as error:
        return str(error)
    return "nothing was"


def _file(
    request: dict[str, Any], ranks: Ranks, said: list[dict[str, Any]], weights: Mapping[str, torch.Tensor]
) -> None:
    if ranks.leads:
        torch.save(dict(weights), Path(request["out"]) / "weights.pt")
        (Path(request["out"]) / "said.json").write_text(json.dumps(said))


MAX_LOGITS = scoring.MAX_LOGITS


def listen() -> None:
    """Answer requests, until this process is killed."""
    torch.set_num_threads(1)
    with Ranks.joined() as joined:
        for line in sys.stdin:
            asked = json.loads(line)
            scoring.MAX_LOGITS = asked.get("logits", MAX_LOGITS)
            work(asked, joined)
            print("done", flush=True)
