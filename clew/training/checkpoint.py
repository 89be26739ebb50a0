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

import errno
import logging
import os
from hashlib import file_digest
from pathlib import Path
from typing import Any, NotRequired, cast

import torch
from pydantic import with_config
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import TypedDict

from clew.config import Config
from clew.config_fields import Checkpoint
from clew.errors import ModelError, RecordError
from clew.models.loading import is_out_of_memory, load_value_model
from clew.reading import STRICT, Count, Number, read_bytes, read_json
from clew.reading import check as check_fields
from clew.record import chain
from clew.record.files import write_bytes
from clew.record.rows import check_format
from clew.record.run import RunDirectory
from clew.training.engine import TrainEngine
from clew.training.saving import remove_folder, save_model, save_tokenizer, written_aside
from clew.training.sharded_digest import Digests, digest_tensors
from clew.training.sharding import collect, like, state_of

log = logging.getLogger("clew.training")

FORMAT = 1
"""Version of the format of checkpoint.json. Newer ones are refused."""
STATE = "trainer/state.safetensors"
"""Path of the optimizer's state. It has a folder of its own because vLLM loads every *.safetensors beside a model."""
CRITIC = "trainer/critic"
ADAPTER = "adapter"
BY_TENSOR = "by tensor"
"""Placeholder for the digest of a file whose tensors each have a digest."""
LOADED = (".json", ".jinja", ".txt", ".model", ".safetensors", ".bin", ".py")
"""Suffixes of files in a folder that transformers or an inference engine may load. Others, such as README.md, are
ignored."""
SMALL = 1024
"""Size in bytes below which a file of tensors, hardly more than its header, gets a digest as a whole."""
GO_ON = "remove the checkpoint, and the run goes on from the one before; or restore it from a copy"


@with_config(STRICT)
class Manifest(TypedDict):
    """Content of checkpoint.json. Older checkpoints lack the fields that are not required."""

    format: Count
    version: Count
    updates: Count
    critic_updates: Count | None
    dtype: str
    lora_rank: NotRequired[Count | None]
    recent_norms: list[Number]
    weights: dict[str, str]
    state: dict[str, str]
    follows: NotRequired[str | None]
    files: NotRequired[dict[str, str]]
    seal: NotRequired[str]
    drifted: NotRequired[bool]


def is_due(version: int, config: Config) -> bool:
    """Return whether a run saves the weights of this version: version 0, every checkpoint.every_steps, and the last.

    A run that was resumed with fewer training.steps may be past the last already: then every version is saved.
    """
    return version % config.checkpoint.every_steps == 0 or version >= config.training.steps


def save(engine: TrainEngine, folder: Path, *, follows: str | None = None) -> None:
    """Write a checkpoint that any number of ranks can load. Every rank calls this at once; rank 0 writes.

    The folder appears all at once. An existing one with the same content is left as it is.

    Args:
        follows: Digest of the JSON of the step that led here (`clew.record.chain`). None for the model that a run
            begins with, and when no steps are recorded.
    """
    manifest = {
        "format": FORMAT,
        **numbers_of(engine),
        "dtype": engine.config.model.dtype,
        "lora_rank": engine.config.training.lora_rank,
        "follows": follows,
        **({"drifted": True} if engine.drifted else {}),
        **digests_of(engine),
    }

    def is_written() -> bool:
        path = folder / "checkpoint.json"
        # The file also has a seal and digests of the files. These are not compared: a user may add a README.md.
        return path.exists() and read_json(path).items() >= manifest.items()

    if engine.ranks.agree(f"whether {folder.name} is written already", is_written):
        if engine.ranks.leads:
            point("latest", folder)  # the process may have been killed before it did this
        return
    weights, state = engine.policy.published_state(), collect(_state(engine), engine.ranks)
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
            manifest["files"] = _files(aside, merged=engine.policy.adapters is not None)
            write_bytes(aside / "checkpoint.json", chain.sealed(manifest))
        point("latest", folder)
    engine.ranks.agree(f"that {folder.name} is written", lambda: None)  # `meet` has a time limit


def load(engine: TrainEngine, folder: Path) -> None:
    """Restore the state that `engine` had when `save` was called. The engine is unchanged when this raises.

    Raises:
        RecordError: The checkpoint is missing, truncated, altered or newer than this version of Clew.
        ModelError: The checkpoint belongs to another model.
    """
    if not (folder / "checkpoint.json").exists():
        raise RecordError(f"Cannot load {folder}: it is not a checkpoint, because it has no checkpoint.json.")
    manifest = read_manifest(folder)
    for field, then, now in (
        ("model.dtype", manifest["dtype"], engine.config.model.dtype),
        ("training.lora_rank", manifest.get("lora_rank"), engine.config.training.lora_rank),
    ):
        if then != now:
            raise ModelError(
                f"{folder} was trained with {field}={then or 'null'}, this run has {now or 'null'}. Set it back, or "
                f"start another trial=NAME from that folder."
            )
    weights, state = _read_tensors(folder, engine, manifest)
    _check_same_model(folder, dict(engine.trained_parameters()), weights)
    _check_digests(folder, engine, manifest, weights, state)
    with torch.no_grad():
        for name, parameter in engine.trained_parameters():
            parameter.copy_(like(parameter, weights[name]))
    engine.optimizer.load_state(state, updates=manifest["updates"])
    if engine.critic is not None:
        of_critic = {name.removeprefix("critic."): state[name] for name in state if name.startswith("critic.")}
        engine.critic.optimizer.load_state(of_critic, updates=manifest["critic_updates"] or 0)
    engine.restored(manifest["version"], manifest["recent_norms"])
    engine.drifted = manifest.get("drifted", False)


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
        "weights": _hex(engine.weights_digests()),
        "state": _hex(digest_tensors(_state(engine).items(), engine.ranks)),
    }


def digests_in(folder: Path, engine: TrainEngine) -> dict[str, dict[str, str]]:
    """Return the digest of each tensor in a checkpoint's files, by kind and name.

    Raises:
        RecordError: The checkpoint is truncated, or its numbers or a file without digested tensors were altered.
    """
    return _digests(engine, *_read_tensors(folder, engine, read_manifest(folder)))


def check(folder: Path, engine: TrainEngine) -> None:
    """Raise RecordError when a checkpoint's files do not match its checkpoint.json."""
    manifest = read_manifest(folder)
    _check_digests(folder, engine, manifest, *_read_tensors(folder, engine, manifest))


def check_reference(engine: TrainEngine, first: Path) -> None:
    """Raise ModelError when the reference is not the model in a run's first checkpoint. Every rank calls this at once.

    With adapters, the reference is their base, which `load` compares. Nothing is compared if the checkpoint no longer
    exists.
    """
    if engine.policy.reference is None or engine.policy.adapters is not None or not first.exists():
        return
    began_with = read_manifest(first)["weights"]
    for name, digest in _hex(digest_tensors(engine.policy.reference.named_parameters(), engine.ranks)).items():
        if digest != began_with.get(name):
            raise ModelError(
                f"{engine.config.model.path} (model.path), the reference of algorithm.kl_coef, is not the model that "
                f"the run began with: the digest of {name} is {digest}, and was {began_with.get(name, 'none')}. "
                f"Restore that model; its weights are in {first}."
            )


def check_files(folder: Path) -> None:
    """Raise RecordError when part of a checkpoint is no regular file, or a file without digested tensors was altered.

    Call it before other libraries read the files: they may wait forever, or fail with a message that does not help.
    """
    if problem := _problem_of_files(folder, read_manifest(folder)):
        raise _altered(folder, problem)


def prune(run: RunDirectory, wanted: Checkpoint) -> None:
    """Remove all checkpoints but the first, the last `keep` and, with `keep_best`, the one with the best evaluation.

    The link checkpoints/best points to the best one.
    """
    versions = run.checkpointed()
    kept = {*versions[:1], *versions[-wanted.keep :]}  # the first is the reference of a KL term
    if wanted.keep_best and (best := run.evals.best(versions, run.facts().get("changes", []))) is not None:
        kept.add(best)
        point("best", run.checkpoint(best))
    for version in versions:
        if version not in kept:
            remove_folder(run.checkpoint(version))
    best_link = run.checkpoints / "best"
    if best_link.is_symlink() and not best_link.exists():  # without keep_best, its checkpoint is removed at last
        best_link.unlink()


def point(name: str, folder: Path) -> None:
    """Make the link `name` ("latest", "best") beside this checkpoint point to it, atomically.

    The link is only for people and for model.path, so a file system without links causes no more than a warning.
    """
    link = folder.with_name(f".{name}.{os.getpid()}")
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(folder.with_name(name))
    except OSError as error:
        log.warning("cannot make the link %s: %s", folder.with_name(name), error)


def _files(folder: Path, *, merged: bool) -> dict[str, str]:
    """Return the digest of each file by its path in the folder; `BY_TENSOR` for large files of tensors."""
    digests = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        # With merged adapters, the model's own file has other tensors than those whose digests are in checkpoint.json.
        has_digests = path.suffix == ".safetensors" and not (merged and path.parent == folder)
        by_tensor = has_digests and path.stat().st_size >= SMALL
        digests[path.relative_to(folder).as_posix()] = BY_TENSOR if by_tensor else _digest_of(path)
    return digests


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()[:16]


def _problem_of_files(folder: Path, manifest: Manifest) -> str:
    """Return how the files differ from those in checkpoint.json; empty if they do not."""
    files = manifest.get("files", {})
    lists_all = any(name.endswith(".safetensors") for name in files)  # older checkpoints list only some, or none
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir()):
        name = path.relative_to(folder).as_posix()
        if not path.is_file():  # safetensors would wait forever at a named pipe
            return f"{name} is no file"
        if lists_all and path.suffix in LOADED and name not in {*files, "checkpoint.json"}:
            return (
                f"{name} is not among the files that it was saved with (if you put it there, move it elsewhere, and "
                f"keep the checkpoint)"
            )
    for name, digest in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if digest != BY_TENSOR and (now := _digest_of(folder / name)) != digest:
            return f"{name} has the digest {now}; checkpoint.json says {digest}"
    return ""


def _read_tensors(folder: Path, engine: TrainEngine, manifest: Manifest) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the trained parameters, named as in the engine, and the state of both optimizers."""
    checked = f"the files of {folder.name} to be checked"
    if problem := engine.ranks.agree(checked, lambda: _problem_of_files(folder, manifest)):
        raise _altered(folder, problem)
    cpu = torch.device("cpu")
    if engine.critic is not None and not (folder / CRITIC).is_dir():
        raise RecordError(
            f"{folder} has no critic ({CRITIC}), which algorithm.advantages="
            f"{engine.config.algorithm.advantages} needs: it was trained without. Start "
            f"another trial=NAME from that folder (model.path)."
        )
    try:
        if engine.policy.adapters is not None:
            from clew.training.lora import read_adapters

            weights = read_adapters(folder / ADAPTER)
        else:
            weights: dict[str, Tensor] = dict(engine.policy.load(str(folder), cpu).named_parameters())
        if engine.critic is not None:
            critic = load_value_model(str(folder / CRITIC), engine.config.model.dtype, cpu, "its critic")
            weights |= {f"critic.{name}": parameter for name, parameter in critic.named_parameters()}
        return weights, load_file(folder / STATE)
    except (ModelError, SafetensorError, OSError) as error:
        cause = error.__cause__ or error
        if is_out_of_memory(cause) or getattr(cause, "errno", None) not in (None, errno.ENOENT):
            raise RecordError(f"Cannot read checkpoint {folder}: {error}") from error
        raise _altered(folder, str(error)) from error


def _state(engine: TrainEngine) -> dict[str, Tensor]:
    """Return the state of both optimizers."""
    critic = engine.critic.optimizer.state() if engine.critic is not None else {}
    return {**engine.optimizer.state(), **{f"critic.{name}": tensor for name, tensor in critic.items()}}


def read_manifest(folder: Path) -> Manifest:
    """Return the content of checkpoint.json. Raises RecordError if it is newer, altered, or from another folder."""
    path = folder / "checkpoint.json"
    manifest: Any = read_json(path)
    if isinstance(manifest, dict) and "format" in manifest:
        check_format(path, manifest["format"], FORMAT)
    check_fields(path, manifest, Manifest, GO_ON)
    if chain.seal_broken(read_bytes(path)):
        raise _altered(folder, "the seal of checkpoint.json does not match its content")
    if chain.CHECKPOINT_FOLDER.fullmatch(folder.name) and folder.name != f"step-{manifest['version']:06d}":
        raise _altered(folder, f"checkpoint.json says that it is of version {manifest['version']}")
    return cast(Manifest, manifest)


def _digests(engine: TrainEngine, weights: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, dict[str, str]]:
    return {
        "weights": _hex(engine.frozen_digests | digest_tensors(weights.items())),
        "state": _hex(digest_tensors(state.items())),
    }


def _check_digests(
    folder: Path, engine: TrainEngine, manifest: Manifest, weights: dict[str, Tensor], state: dict[str, Tensor]
) -> None:
    # Without this, an optimizer would start afresh for a parameter whose moments are missing.
    if missing := sorted(manifest["state"].keys() - state.keys()):
        raise _altered(folder, f"{missing[0]} is missing in {STATE}")
    for kind, digests in _digests(engine, weights, state).items():
        for name, digest in digests.items():
            then = manifest[kind].get(name)
            if digest == then:
                continue
            if name in engine.frozen_digests:
                raise ModelError(
                    f"{engine.config.model.path} (model.path) is not the model that the adapters in {folder} were "
                    f"trained on: {name} has the digest {digest}, then {then}. Put it back."
                )
            raise _altered(folder, f"{name} ({kind}) has the digest {digest}; checkpoint.json says {then}")


def _hex(digests: Digests) -> dict[str, str]:
    return {name: f"{digest:016x}" for name, digest in digests.items()}


def _check_same_model(folder: Path, parameters: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    for name in [*parameters, *saved]:
        now, then = _shape(parameters.get(name)), _shape(saved.get(name))
        if now != then:
            raise ModelError(
                f"{folder} belongs to another model than model.path: {name} is {then} in the checkpoint and {now} in "
                f"this run's model. Set model.path to the model that this run began with, or start another trial=NAME."
            )


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else "x".join(map(str, tensor.shape)) or "a number"


def _altered(folder: Path, why: str) -> RecordError:
    return RecordError(f"checkpoint {folder} was altered after it was written: {why}. {GO_ON[0].upper()}{GO_ON[1:]}.")
