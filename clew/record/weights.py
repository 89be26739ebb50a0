"""References to weights on their way from the trainer to inference."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import TypedDict

from clew.errors import RecordError
from clew.reading import Count, Finite, read_json

DIGEST_KEY = "clew_digest"
"""Key of WeightRef.digest in the metadata of the safetensors file that the trainer writes."""

DIGESTS_KEY = "clew_digests"
"""Key of the digests of the tensors in the file, as JSON by name, in hexadecimal."""


BROADCAST_FILE = "broadcast.json"
"""File that stands in for weights that were broadcast: their digests and SGLang's checksums, by tensor."""


class BroadcastDigests(TypedDict):
    """Content of broadcast.json."""

    digests: dict[str, str]
    """Digest of each tensor that was sent, in hexadecimal."""
    checksums: dict[str, list[str]]
    """Checksums by the names of SGLang's tensors, some of which join several; empty for other engines."""


def outside_folder(parent: str, run: Path) -> Path:
    """Return the folder for a run's weights within inference.weights, which several runs may share."""
    name = hashlib.blake2b(str(run.resolve()).encode(), digest_size=6).hexdigest()
    return Path(parent) / f"clew-{name}"


@dataclass(frozen=True, kw_only=True)
class WeightRef:
    """Location and digest of a version's weights. They are valid until every engine has loaded the next version."""

    version: Count
    path: str
    """Folder with model.safetensors and config.json, or with adapters in peft's form (adapter_model.safetensors), on
    disk or in shared memory, readable by every engine."""
    digest: str
    """Digest of all parameters, see `clew.record.array_digest`."""
    probe_ids: list[Count] = field(default_factory=list)
    """Token IDs of a short sequence that is scored after each load."""
    probe_logprob: Finite = 0.0
    """Logprob that the trainer's own model gives the last token of `probe_ids`, given those before (temperature 1)."""

    def exists(self) -> bool:
        return Path(self.path).is_dir()

    def was_broadcast(self) -> bool:
        """Return whether the trainer sent the weights itself (weights.via=collective); `path` has their digests."""
        return (Path(self.path) / BROADCAST_FILE).exists()

    def holds_adapters(self) -> bool:
        """Return whether only adapters were written, in peft's form, and not the whole model."""
        return (Path(self.path) / "adapter_config.json").exists()


def read_broadcast(ref: WeightRef) -> BroadcastDigests:
    """Return what the trainer says of the weights that it has broadcast. Raises RecordError if it cannot be read."""
    return read_json(Path(ref.path) / BROADCAST_FILE, BroadcastDigests)


def read_digests(ref: WeightRef) -> dict[str, str]:
    """Return the trainer's digest of each tensor in the files of `ref`, in hexadecimal.

    Raises:
        RecordError: The files cannot be read, or have no such digests.
    """
    if ref.was_broadcast():
        return read_broadcast(ref)["digests"]
    digests: dict[str, str] = {}
    for file in sorted(Path(ref.path).glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
            digests |= json.loads(header["__metadata__"][DIGESTS_KEY])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RecordError(
                f"Cannot check the weights in {file}: it has no digests of its tensors ({type(error).__name__}: "
                f"{error}). Only what Clew's trainer publishes can be loaded into this server."
            ) from None
    if not digests:
        raise RecordError(f"Cannot read the weights in {ref.path}: there is no safetensors file.")
    return digests
