"""Checkpoints, from which a killed run restarts bit for bit.

::

    step-000130/
      model.safetensors, config.json, tokenizer files     as save_pretrained writes them; transformers reads them
      adapter/                                            the adapters alone, as PeftModel reads them
      trainer/state.safetensors                           optimizer moments, float32 masters
      trainer/critic/                                     the critic, as AutoModelForSequenceClassification reads it
      checkpoint.json                                     version, updates, digests of tensors and other files
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, NotRequired

import torch
from pydantic import with_config
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import TypedDict

from clew.config import Config
from clew.errors import ModelError, RecordError
from clew.models.loading import load_value_model
from clew.reading import STRICT, Count, Number, read_bytes, read_json
from clew.reading import check as check_fields
from clew.record import chain
from clew.record.files import remove_strays, write_bytes
from clew.record.rows import check_format
from clew.training.digests import Digests, digest_tensors
from clew.training.engine import TrainEngine
from clew.training.folders import remove_folder, save_model, save_tokenizer, written_aside
from clew.training.sharding import collect, like, state_of

log = logging.getLogger("clew.training")

FORMAT = 1
"""Version of the format of checkpoint.json. Newer ones are refused."""
STATE = "trainer/state.safetensors"
"""Path of the optimizer's state. It has a folder of its own because vLLM loads every *.safetensors beside a model."""
CRITIC = "trainer/critic"
ADAPTER = "adapter"
_RANDOM = "random.torch"
"""Name of a state tensor in checkpoints from before each step had its own seed."""
_NUMBERS = ("version", "updates", "critic_updates", "recent_norms")
_OF_FILES = ("files", "seal")
"""Fields of checkpoint.json about the files beside it and about itself."""
BY_TENSOR = "by tensor"
"""Placeholder for the digest of a file whose tensors each have a digest."""
LOADED = (".json", ".jinja", ".txt", ".model", ".safetensors", ".bin", ".py")
"""Suffixes of files in a folder that transformers or an inference engine may load. Others, such as README.md, are
ignored."""
SMALL = 1024
"""Bytes below which a file of tensors is hardly more than its header, and has a digest of its own."""
GO_ON = "remove the checkpoint, and the run goes on from the one before; or restore it from a copy"


@with_config(STRICT)
class Said(TypedDict):
    """Content of checkpoint.json."""

    format: Count
    version: Count
    updates: Count
    critic_updates: Count | None
    dtype: NotRequired[str]
    lora_rank: NotRequired[Count | None]
    recent_norms: list[Number]
    weights: dict[str, str]
    state: dict[str, str]
    follows: NotRequired[str | None]
    numbers: NotRequired[str]
    files: NotRequired[dict[str, str]]
    seal: NotRequired[str]


def is_due(version: int, config: Config) -> bool:
    """Return whether a run saves the weights of this version: version 0, every checkpoint.every_steps, and the last."""
    return version % config.checkpoint.every_steps == 0 or version == config.training.steps


def save(engine: TrainEngine, folder: Path, *, follows: str | None = None) -> None:
    """Write a checkpoint that any number of ranks can load. Every rank calls this at once; rank 0 writes.

    The folder appears all at once. An existing one with the same content is left as it is.

    Args:
        engine: The engine whose state is written.
        folder: The folder to write.
        follows: Digest of the JSON of the step that led here (`clew.record.chain`). None for the model that a run
            begins with, and when no steps are recorded.

    Raises:
        RecordError: The disk is full.
    """
    state = _state(engine)
    said = {
        "format": FORMAT,
        **numbers_of(engine),
        "dtype": engine.config.model.dtype,
        "lora_rank": engine.config.training.lora_rank,
        "follows": follows,
        "weights": _said(engine.weights_digests()),
        "state": _said(digest_tensors(state.items(), engine.ranks)),
    }

    def there() -> bool:
        path = folder / "checkpoint.json"
        return path.exists() and {**read_json(path), **dict.fromkeys(_OF_FILES)} == {**said, **dict.fromkeys(_OF_FILES)}

    if engine.ranks.agree(f"whether {folder.name} is written already", there):
        if engine.ranks.leads:
            point_latest(folder)  # a kill may have come between the two
        return
    weights, state = engine.policy.published_state(), collect(state, engine.ranks)
    adapters = None if engine.policy.adapters is None else state_of(engine.policy.model, engine.ranks)
    critic = None if engine.critic is None else state_of(engine.critic.inner, engine.ranks)
    if engine.ranks.leads:
        with written_aside(folder) as aside:
            save_model(engine.policy.model, aside, weights)
            if engine.policy.vision is not None:
                engine.policy.vision.save(aside)
            save_tokenizer(engine.policy.tokenizer, aside)
            if engine.policy.adapters is not None and adapters is not None:
                engine.policy.adapters.save(aside / ADAPTER, adapters)
            (aside / STATE).parent.mkdir()
            if engine.critic is not None and critic is not None:
                save_model(engine.critic.inner, aside / CRITIC, critic)
                save_tokenizer(engine.policy.tokenizer, aside / CRITIC)
            save_file(state, aside / STATE)
            said["files"] = _files(aside, merged=engine.policy.adapters is not None)
            write_bytes(aside / "checkpoint.json", chain.sealed(said))
        point_latest(folder)
    engine.ranks.meet()


def load(engine: TrainEngine, folder: Path) -> None:
    """Restore the state that `engine` had when `save` was called. The engine is unchanged when this raises.

    Raises:
        RecordError: The checkpoint is missing, truncated, altered or newer than this version of Clew.
        ModelError: The checkpoint belongs to another model.
    """
    if not (folder / "checkpoint.json").exists():
        raise RecordError(f"{folder} is no checkpoint: it holds no checkpoint.json.")
    said = facts(folder)
    for field, now in (
        ("model.dtype", engine.config.model.dtype),
        ("training.lora_rank", engine.config.training.lora_rank),
    ):
        then = said.get(field.partition(".")[2])
        if then != now:
            raise ModelError(
                f"{folder} was trained with {field}={then or 'null'}, this run has {now or 'null'}. Set it back, or "
                f"start another trial=NAME from that folder."
            )
    weights, state = _read(folder, engine, said)
    _check_same_model(folder, engine.trained_parameters(), weights.items())
    _check_digests(folder, engine, _digests(engine, weights, state))
    with torch.no_grad():
        for name, parameter in engine.trained_parameters():
            parameter.copy_(like(parameter, weights[name]))
    state.pop(_RANDOM, None)
    own, critics = _by_owner(state)
    engine.optimizer.load_state(own, updates=said["updates"])
    if engine.critic is not None:
        engine.critic.optimizer.load_state(critics, updates=said["critic_updates"])
    engine.restored(said["version"], said["recent_norms"])


def numbers_of(engine: TrainEngine) -> dict[str, Any]:
    """Return the numbers that a checkpoint would hold now beside its tensors, by their names in checkpoint.json."""
    return {
        "version": engine.version,
        "updates": engine.optimizer.updates,
        "critic_updates": engine.critic.optimizer.updates if engine.critic is not None else None,
        "recent_norms": list(engine.recent_norms),
    }


def digests_of(engine: TrainEngine) -> dict[str, dict[str, str]]:
    """Return the digest of each tensor that a checkpoint would hold now, by kind and name."""
    return {
        "weights": _said(engine.weights_digests()),
        "state": _said(digest_tensors(_state(engine).items(), engine.ranks)),
    }


def digests_in(folder: Path, engine: TrainEngine) -> dict[str, dict[str, str]]:
    """Return the digest of each tensor in a checkpoint's files, by kind and name.

    Raises:
        RecordError: The checkpoint is truncated, or its numbers or a file without digested tensors were altered.
    """
    return _digests(engine, *_read(folder, engine, facts(folder)))


def check(folder: Path, engine: TrainEngine) -> None:
    """Raise RecordError when a checkpoint's files do not match its checkpoint.json."""
    _check_digests(folder, engine, digests_in(folder, engine))


def check_files(folder: Path) -> None:
    """Raise RecordError when part of a checkpoint is no regular file, or a file without digested tensors was altered.

    Call it before other libraries read the files: they may wait forever, or fail with a message that does not help.
    """
    if wrong := _wrong_file(folder, facts(folder).get("files", {})):
        raise _altered(folder, wrong)


def saved(checkpoints: Path) -> list[Path]:
    """Return the checkpoints in a folder of checkpoints, oldest first."""
    return sorted(path.parent for path in checkpoints.glob("step-*/checkpoint.json"))


def latest_version(checkpoints: Path) -> int:
    """Return the version of the newest checkpoint; 0 if there is none, as the run then begins with its model."""
    return max((int(folder.name.removeprefix("step-")) for folder in saved(checkpoints)), default=0)


def clean(checkpoints: Path) -> None:
    """Remove files that killed processes left half-written."""
    remove_strays(checkpoints, "*")


def prune(checkpoints: Path, keep: int) -> None:
    """Remove all checkpoints but the first and the last `keep`."""
    for folder in saved(checkpoints)[1:-keep]:
        remove_folder(folder)


def point_latest(folder: Path) -> None:
    """Point the link `latest` beside this checkpoint to it, atomically.

    The link is for people and for model.path: if the file system has no links, this only logs a warning.
    """
    link = folder.with_name(f".latest.{os.getpid()}")
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(folder.with_name("latest"))
    except OSError as error:
        log.warning("cannot make the link %s: %s", folder.with_name("latest"), error)


def _files(folder: Path, *, merged: bool) -> dict[str, str]:
    """Return the digest of each file by its path in the folder; `BY_TENSOR` for large files of tensors.

    Args:
        merged: Whether adapters are merged into the model, so that the digested tensors are not those in its files.
    """
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: BY_TENSOR if _by_tensor(path, folder, merged) else _digest_of(path) for name, path in found.items()}


def _by_tensor(path: Path, folder: Path, merged: bool) -> bool:
    digested = path.suffix == ".safetensors" and not (merged and path.parent == folder)
    return digested and path.stat().st_size >= SMALL


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()[:16]


def _wrong_file(folder: Path, said: Mapping[str, str]) -> str:
    """Return which file differs from checkpoint.json, and how; empty if none does."""
    for path in sorted(folder.rglob("*")):  # safetensors would wait for ever at a named pipe
        if not path.is_file() and not path.is_dir():
            return f"{path.relative_to(folder)} is no file"
    for name, digest in said.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if digest != BY_TENSOR and (now := _digest_of(folder / name)) != digest:
            return f"{name} has the digest {now}; checkpoint.json says {digest}"
    return _added(folder, said)


def _added(folder: Path, said: Mapping[str, str]) -> str:
    """Return a file that was added later and would be loaded, such as a chat template; empty if there is none.

    Older checkpoints do not list all of their files, and are not checked.
    """
    for path in sorted(folder.rglob("*")) if any(name.endswith(".safetensors") for name in said) else ():
        name = path.relative_to(folder).as_posix()
        if path.suffix in LOADED and name not in {*said, "checkpoint.json"}:
            return f"{name} is not among the files that it was saved with"
    return ""


def _read(folder: Path, engine: TrainEngine, said: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the trained parameters, named as in the engine, and the optimizer state.

    Args:
        said: Content of checkpoint.json; older ones list no files.
    """
    if wrong := engine.ranks.agree(
        f"the files of {folder.name} to be looked at", lambda: _wrong_file(folder, said.get("files", {}))
    ):
        raise _altered(folder, wrong)
    cpu = torch.device("cpu")
    if engine.critic is not None and not (folder / CRITIC).is_dir():
        raise RecordError(
            f"{folder} has no critic ({CRITIC}), which algorithm.advantages=gae needs: it was trained without. Start "
            f"another trial=NAME from that folder (model.path)."
        )
    try:
        if engine.policy.adapters is not None:
            from clew.training.lora import read_adapters

            weights = read_adapters(folder / ADAPTER)
        else:
            weights: dict[str, Tensor] = dict(engine.policy.read(str(folder), cpu).named_parameters())
        if engine.critic is not None:
            critic = load_value_model(str(folder / CRITIC), engine.config.model.dtype, cpu, "its critic")
            weights |= {f"critic.{name}": parameter for name, parameter in critic.named_parameters()}
        return weights, load_file(folder / STATE)
    except (ModelError, SafetensorError, OSError) as error:
        raise _altered(folder, str(error)) from error


def _state(engine: TrainEngine) -> dict[str, Tensor]:
    """Return the state of both optimizers."""
    critic = engine.critic.optimizer.state() if engine.critic is not None else {}
    return {**engine.optimizer.state(), **{f"critic.{name}": tensor for name, tensor in critic.items()}}


def _by_owner(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split the result of `_state` into the policy's and the critic's part."""
    critic = {name.removeprefix("critic."): tensor for name, tensor in state.items() if name.startswith("critic.")}
    return {name: tensor for name, tensor in state.items() if not name.startswith("critic.")}, critic


def facts(folder: Path) -> dict[str, Any]:
    """Return the content of checkpoint.json.

    Raises:
        RecordError: It is newer, was altered, or has another version than the folder's name.
    """
    path = folder / "checkpoint.json"
    said = read_json(path)
    if isinstance(said, dict) and "format" in said:
        check_format(path, said["format"], FORMAT)
    check_fields(path, said, Said, GO_ON)
    if chain.seal_broken(read_bytes(path)):
        raise _altered(folder, "the seal of checkpoint.json does not fit what it says")
    now = sha256(json.dumps([said[name] for name in _NUMBERS]).encode()).hexdigest()[:16]
    if said.get("numbers", now) != now:  # written before there were seals
        raise _altered(folder, f"{', '.join(_NUMBERS)} in checkpoint.json have the digest {now}, not {said['numbers']}")
    if re.fullmatch(r"step-\d{6,}", folder.name) and folder.name != f"step-{said['version']:06d}":
        raise _altered(folder, f"checkpoint.json says that it is of version {said['version']}")
    return said


def _digests(engine: TrainEngine, weights: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, dict[str, str]]:
    return {
        "weights": _said(engine.frozen_digests | digest_tensors(weights.items())),
        "state": _said(digest_tensors(state.items())),
    }


def _check_digests(folder: Path, engine: TrainEngine, found: dict[str, dict[str, str]]) -> None:
    said = facts(folder)
    for kind, digests in found.items():
        for name, digest in digests.items():
            if said[kind].get(name) == digest:
                continue
            if name in engine.frozen_digests:
                raise ModelError(
                    f"{engine.config.model.path} (model.path) is not the model that the adapters in {folder} were "
                    f"trained on: {name} has the digest {digest}, then {said[kind].get(name)}. Put it back."
                )
            raise _altered(
                folder, f"{name} ({kind}) has the digest {digest}; checkpoint.json says {said[kind].get(name)}"
            )


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
    return RecordError(f"checkpoint {folder} was altered after it was written: {why}. {GO_ON[0].upper()}{GO_ON[1:]}.")
