"""Checkpoints: what a killed run restarts from, bit for bit.

::

    step-000130/
      model.safetensors, config.json, tokenizer files     as save_pretrained writes them; transformers reads them
      trainer/state.safetensors                           optimizer moments, float32 masters, random state
      checkpoint.json                                     version, updates, digests
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from clew.config import Config
from clew.errors import ModelError, RecordError
from clew.models import load_model
from clew.record.files import read_json, remove_strays, write_json
from clew.record.rows import check_format
from clew.training.digests import Digests, digest_tensors
from clew.training.engine import TrainEngine
from clew.training.folders import remove_folder, save_model, save_tokenizer, written_aside
from clew.training.sharding import collect, fill, state_of

FORMAT = 1
"""Version of checkpoint.json. A reader refuses a newer one."""
STATE = "trainer/state.safetensors"
"""In a folder of its own: vLLM loads every *.safetensors that lies beside a model."""
_RANDOM = "random.torch"


def is_due(version: int, config: Config) -> bool:
    """Whether a run saves the weights of this version: 0, every so many, and the last."""
    return version % config.checkpoint.every_steps == 0 or version == config.training.steps


def save(engine: TrainEngine, folder: Path) -> None:
    """Write a checkpoint, which any number of ranks can load; `folder` appears whole. One that is there already and is
    the same is left as it is. Every rank calls this at once; rank 0 writes.

    Raises RecordError when the disk is full.
    """
    state = {**engine.optimizer.state(), _RANDOM: torch.get_rng_state()}
    said = {
        "format": FORMAT,
        "version": engine.version,
        "updates": engine.optimizer.updates,
        "dtype": engine.config.model.dtype,
        "recent_norms": list(engine.recent_norms),
        "weights": _said(engine.weights_digests()),
        "state": _said(digest_tensors(state.items(), engine.ranks)),
    }

    def there() -> bool:
        return (folder / "checkpoint.json").exists() and read_json(folder / "checkpoint.json") == said

    if engine.ranks.agree(f"whether {folder.name} is written already", there):
        return
    weights, state = state_of(engine.model, engine.ranks), collect(state, engine.ranks)
    if engine.ranks.leads:
        with written_aside(folder) as aside:
            save_model(engine.model, aside, weights)
            save_tokenizer(engine.tokenizer, aside)
            (aside / STATE).parent.mkdir()
            save_file(state, aside / STATE)
            write_json(aside / "checkpoint.json", said)
    engine.ranks.meet()


def load(engine: TrainEngine, folder: Path) -> None:
    """Bring `engine` to where `save` was called; The engine is untouched when this raises.

    Raises RecordError: missing, truncated, altered, newer; ModelError: a checkpoint of another model.
    """
    if not (folder / "checkpoint.json").exists():
        raise RecordError(f"{folder} is no checkpoint: it holds no checkpoint.json.")
    said = read_json(folder / "checkpoint.json")
    check_format(folder / "checkpoint.json", said["format"])
    if said["dtype"] != engine.config.model.dtype:
        raise ModelError(
            f"{folder} was trained with model.dtype={said['dtype']}, this run has "
            f"{engine.config.model.dtype}. Set it back, or start another trial=NAME from that folder."
        )
    loaded, state = _read(folder, engine.config.model.dtype)
    _check_same_model(folder, engine.model.named_parameters(), loaded.named_parameters())
    for kind, found in (
        ("weights", digest_tensors(loaded.named_parameters())),
        ("state", digest_tensors(state.items())),
    ):
        for name, digest in _said(found).items():
            if said[kind].get(name) != digest:
                raise _altered(
                    folder, f"{name} ({kind}) has the digest {digest}; checkpoint.json says {said[kind].get(name)}"
                )
    fill(engine.model, loaded.state_dict())
    torch.set_rng_state(state.pop(_RANDOM))
    engine.optimizer.load_state(state, updates=said["updates"])
    engine.restored(said["version"], said["recent_norms"])


def digests_of(engine: TrainEngine) -> dict[str, dict[str, str]]:
    """The digest of each tensor that a checkpoint would hold now, but for the random state; by kind and name."""
    return {
        "weights": _said(engine.weights_digests()),
        "state": _said(digest_tensors(engine.optimizer.state().items(), engine.ranks)),
    }


def digests_in(folder: Path, engine: TrainEngine) -> dict[str, dict[str, str]]:
    """The same of the files in a checkpoint. Raises RecordError: truncated."""
    loaded, state = _read(folder, engine.config.model.dtype)
    return {
        "weights": _said(digest_tensors(loaded.named_parameters())),
        "state": _said(digest_tensors(state.items())),
    }


def saved(checkpoints: Path) -> list[Path]:
    """The checkpoints in a folder of them, oldest first."""
    return sorted(path.parent for path in checkpoints.glob("step-*/checkpoint.json"))


def versions(checkpoints: Path) -> list[int]:
    """The versions of which there are checkpoints, oldest first."""
    return [int(folder.name.removeprefix("step-")) for folder in saved(checkpoints)]


def latest_version(checkpoints: Path) -> int:
    """The version of the newest checkpoint; 0 where there is none (the run then begins with its model)."""
    return max(versions(checkpoints), default=0)


def clean(checkpoints: Path) -> None:
    """Remove what killed processes left half-written."""
    remove_strays(checkpoints, "*")


def prune(checkpoints: Path, keep: int) -> None:
    """Remove all but the first and the last `keep`."""
    for folder in saved(checkpoints)[1:-keep]:
        remove_folder(folder)


def point_latest(checkpoints: Path, folder: Path) -> None:
    """Have `checkpoints/latest` point at this checkpoint, from one moment to the next."""
    link = checkpoints / ".latest"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(checkpoints / "latest")


def _read(folder: Path, dtype: Any) -> tuple[Any, dict[str, Tensor]]:
    try:
        return load_model(str(folder), dtype, torch.device("cpu")), load_file(folder / STATE)
    except (ModelError, SafetensorError, OSError) as error:
        raise _altered(folder, str(error)) from error


def _said(digests: Digests) -> dict[str, str]:
    return {name: f"{digest:016x}" for name, digest in digests.items()}


def _check_same_model(folder: Path, ours: Iterable[tuple[str, Tensor]], theirs: Iterable[tuple[str, Tensor]]) -> None:
    mine, found = ({name: tuple(tensor.shape) for name, tensor in named} for named in (ours, theirs))
    for name in [*mine, *found]:
        if mine.get(name) != found.get(name):
            raise ModelError(
                f"{folder} belongs to another model than model.path: {name} is {_shape(found.get(name))} in the "
                f"checkpoint and {_shape(mine.get(name))} in this run's model. Set model.path to the model that this "
                f"run began with, or start another trial=NAME."
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape)) or "a number"


def _altered(folder: Path, why: str) -> RecordError:
    return RecordError(
        f"checkpoint {folder} was altered after it was written: {why}. Remove it, and the run goes on "
        f"from the one before; or restore it from a copy."
    )
