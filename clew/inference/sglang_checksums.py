"""Checksums of the tensors of safetensors files, as SGLang's /weights_checker computes them on a CPU. No torch.

SGLang joins some tensors: its qkv_proj is q_proj, k_proj and v_proj, one below the other, so its bytes are the bytes of
these three in this order. Its checksum is the first 64 bits of the SHA-256 of a tensor's bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import orjson

from clew.errors import EngineError

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Parts of the tensors that SGLang joins, in its order."""

INDEX = "model.safetensors.index.json"
"""File that says which of several files has which tensor."""

PADDED_TO = 64
"""SGLang pads the vocabulary with rows of zeros to a multiple of this."""

BY_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
BLOCK = 1 << 24
"""Bytes that are read at a time."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Location of one tensor."""

    path: Path
    dtype: str
    """Number type as safetensors writes it, such as "BF16"."""
    shape: list[int]
    start: int
    end: int

    def blocks(self, dtype: str) -> Iterator[bytes]:
        """Yield the tensor's bytes, cast to another number type as SGLang casts what it loads."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            left = self.end - self.start
            while left:
                block = file.read(min(left, BLOCK))
                if not block:
                    raise EngineError(f"Cannot read the weights in {self.path}: it shrank while it was read.")
                left -= len(block)
                yield cast_block(block, self.dtype, dtype)


Tensors = Mapping[str, StoredTensor]
"""Tensors of a model's folder, by name."""


def read_folder(folder: str) -> dict[str, StoredTensor]:
    """Return the tensors of a folder's safetensors files: those in its index, if it has one.

    Other files may hold the same weights in another form, such as Mistral's consolidated.safetensors.

    Raises:
        EngineError: There is no such file, or one is cut off.
    """
    tensors: dict[str, StoredTensor] = {}
    try:
        listed = orjson.loads((Path(folder) / INDEX).read_bytes())["weight_map"].values()
        paths = {Path(folder) / name for name in listed}
    except FileNotFoundError:
        paths = set(Path(folder).glob("*.safetensors"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise EngineError(f"Cannot read the list of weights in {folder}/{INDEX}: {error!r}.") from error
    for path in sorted(paths):
        tensors |= _read_header(path)
    if not tensors:
        raise EngineError(f"Cannot use the weights in {folder}: there is no safetensors file.")
    return tensors


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header = orjson.loads(file.read(min(length, size)))
    except (OSError, struct.error, orjson.JSONDecodeError) as error:
        raise EngineError(f"Cannot read the weights in {path}: {error}.") from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = StoredTensor(path=path, dtype=entry["dtype"], shape=entry["shape"], start=start, end=end)
    needed = max((tensor.end for tensor in tensors.values()), default=size)
    if needed != size:
        raise EngineError(f"Cannot use the weights in {path}: it has {size} bytes, and its header says {needed}.")
    return tensors


def cast_block(block: bytes, old: str, new: str) -> bytes:
    """Return F32 as BF16, rounded as torch rounds it, or BF16 as F32; other types are returned as they are."""
    if (old, new) == ("F32", "BF16"):
        bits = numpy.frombuffer(block, "<u4")
        # Adding this rounds to the nearest, ties to even, before the lower half is cut off.
        return ((bits + (0x7FFF + ((bits >> 16) & 1)).astype("<u4")) >> 16).astype("<u2").tobytes()
    if (old, new) == ("BF16", "F32"):
        return (numpy.frombuffer(block, "<u2").astype("<u4") << 16).tobytes()
    return block


def parts_of(name: str) -> list[str]:
    """Return the names, in a checkpoint, of the tensors that a tensor of SGLang consists of."""
    for joined, parts in JOINED.items():
        if f".{joined}." in name:
            return [name.replace(f".{joined}.", f".{part}.") for part in parts]
    return [name]


def parts_in(name: str, sent: Collection[str]) -> list[str]:
    """Return the names, among the tensors `sent`, that a tensor of SGLang consists of; some may be missing there."""
    return [name] if name in sent else parts_of(name)  # Phi-3's own tensors are joined


def left_behind(
    held_before: Mapping[str, str], held: Mapping[str, str], sent_before: Mapping[str, str], sent: Mapping[str, str]
) -> list[str]:
    """Return SGLang's tensors that have not changed, although the trainer has changed a part of them.

    This needs no checksum of the trainer's own, so it also works where SGLang's cannot be computed here: on GPUs it
    uses another function, and with tensor parallelism each rank has a slice. Nothing is said about other tensors.

    Args:
        held_before: SGLang's checksums before the update, by its own names.
        held: Those after it.
        sent_before: The trainer's digests of the weights that SGLang had, by the names of the checkpoint.
        sent: Those of the weights that were sent.
    """
    changed = changed_tensors(sent_before, sent)
    same = [name for name in held if held[name] == held_before.get(name)]
    return [name for name in same if not changed.isdisjoint(parts_in(name, sent))]


def ranks_left_behind(
    held_before: Sequence[Mapping[str, str]],
    held: Sequence[Mapping[str, str]],
    sent_before: Mapping[str, str],
    sent: Mapping[str, str],
) -> list[int]:
    """Return SGLang's ranks that hold what a rank held before, although the trainer has changed most tensors.

    One tensor proves nothing: the numbers that changed may all lie in another rank's slice. The arguments are those of
    `left_behind`, rank by rank.
    """
    changed = changed_tensors(sent_before, sent)
    behind = []
    for rank, tensors in enumerate(held):
        if tensors in held_before:
            count = sum(not changed.isdisjoint(parts_in(name, sent)) for name in tensors)
            if 2 * count > len(tensors):
                behind.append(rank)
    return behind


def changed_tensors(before: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    """Return the tensors that two versions of the weights have with different digests."""
    return {name for name in now.keys() & before.keys() if now[name] != before[name]}


def joined_ranks(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return each tensor's checksums on all ranks, joined."""
    by_name: dict[str, list[str]] = {}
    for tensors in ranks:
        for name, checksum_ in tensors.items():
            by_name.setdefault(name, []).append(checksum_)
    return {name: "".join(sorted(each)) for name, each in by_name.items()}


def checksum(name: str, parts: list[StoredTensor], dtype: str) -> list[str]:
    """Return SGLang's checksums of its tensor `name`, which consists of these parts and has this number type.

    A tensor with a row for each token has two checksums: SGLang pads it for most models, but not for Gemma 3.
    """
    digest = hashlib.sha256()
    for part in parts:
        for block in part.blocks(dtype):
            digest.update(block)
    return _hex_checksums(name, digest, parts[0].shape, {"F32": 4}.get(dtype, 2))


def _hex_checksums(name: str, digest: Any, shape: Sequence[int], number_bytes: int) -> list[str]:
    """Return the checksums of a tensor: as it is, and padded if it has a row for each token."""
    found = [digest.hexdigest()[:16]]
    if name.endswith(BY_VOCABULARY):
        digest.update(bytes(-shape[0] % PADDED_TO * shape[1] * number_bytes))
        found.append(digest.hexdigest()[:16])
    return found


class RunningChecksums:
    """SGLang's checksums of tensors that come one after another."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Any, Sequence[int], int]] = {}

    def add(self, name: str, shape: Sequence[int], block: Any) -> None:
        """Add a tensor, given its shape and its numbers. The parts of a joined one must come in SGLang's order."""
        view = memoryview(block)
        self._open.setdefault(whole_of(name), (hashlib.sha256(), shape, view.itemsize))[0].update(view)

    def by_name(self) -> dict[str, list[str]]:
        """Return the checksums of each tensor of SGLang, by its names, as `checksum` does."""
        return {name: _hex_checksums(name, *each) for name, each in self._open.items()}


def whole_of(name: str) -> str:
    """Return the name of SGLang's tensor that a tensor of a checkpoint is a part of; see `parts_of`."""
    for joined, parts in JOINED.items():
        for part in parts:
            if f".{part}." in name:
                return name.replace(f".{part}.", f".{joined}.")
    return name


def checksums(names: Iterable[str], sent: Tensors, dtype: str) -> dict[str, list[str]]:
    """Return SGLang's checksums of its tensors `names`, given what was sent and the number type that they have.

    A tensor is left out if a part of it was not sent.
    """
    parts = {name: parts_in(name, sent) for name in names}
    whole = {name: [sent[part] for part in needed] for name, needed in parts.items() if sent.keys() >= set(needed)}
    return {name: checksum(name, found, dtype) for name, found in whole.items()}
