"""How weights are named on their way from the trainer to inference."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from clew.record.files import read_json, write_json


@dataclass(frozen=True, kw_only=True)
class WeightRef:
    """Where the weights of a version lie. Valid until its successor is loaded everywhere."""

    version: int
    path: str
    """A folder with model.safetensors (and config.json); on disk or shared memory, readable by every engine."""
    digest: str
    """Of all parameters, see `clew.record.digest`."""
    probe_ids: list[int] = field(default_factory=list)
    """A short sequence that is scored after each load ..."""
    probe_logprob: float = 0.0
    """... and the logprob that the trainer's own model gives its last token, given those before (temperature 1)."""

    def write(self, path: Path) -> None:
        """Write it as JSON, atomically."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> WeightRef:
        """Read what `write` wrote."""
        return cls(**read_json(path))

    def exists(self) -> bool:
        """Whether the weights are still where it says."""
        return Path(self.path).is_dir()
