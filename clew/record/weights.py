"""References to weights on their way from the trainer to inference."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

from clew.reading import Count, Finite, read_json
from clew.record.files import write_json

DIGEST_KEY = "clew_digest"
"""Key of WeightRef.digest in the metadata of the safetensors file that the trainer writes."""


def outside_folder(parent: str, run: Path) -> Path:
    """Return the folder for a run's weights within inference.weights, which several runs may share."""
    name = hashlib.blake2b(str(run.resolve()).encode(), digest_size=6).hexdigest()
    return Path(parent) / f"clew-{name}"


@dataclass(frozen=True, kw_only=True)
class WeightRef:
    """Location and digest of the weights of a version. It is valid until the next version is loaded everywhere."""

    version: Count
    path: str
    """Folder with model.safetensors (and config.json), on disk or in shared memory, readable by every engine."""
    digest: str
    """Digest of all parameters, see `clew.record.digest`."""
    probe_ids: list[Count] = field(default_factory=list)
    """Token IDs of a short sequence that is scored after each load."""
    probe_logprob: Finite = 0.0
    """Logprob that the trainer's own model gives the last token of `probe_ids`, given those before (temperature 1)."""

    def write(self, path: Path) -> None:
        """Write the reference as JSON, atomically."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> WeightRef:
        """Read what `write` wrote. Raises RecordError if it is something else."""
        return read_json(path, cls)

    def exists(self) -> bool:
        """Return whether the weights still exist at `path`."""
        return Path(self.path).is_dir()
