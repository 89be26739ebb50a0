"""Tolerances of replay: how near a computation must come to its record to agree with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Limit within which two values agree: |a - b| <= absolute + relative x |a|. If both are zero: bit for bit."""

    absolute: float = 0.0
    relative: float = 0.0

    @property
    def exact(self) -> bool:
        return not (self.absolute or self.relative)

    def agree(self, recorded: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Return which values agree, as booleans in the shape of the inputs."""
        if self.exact:
            return recorded.view(np.uint32) == found.view(np.uint32)
        both_nan = np.isnan(recorded) & np.isnan(found)
        with np.errstate(invalid="ignore"):
            near = np.abs(recorded - found) <= self.absolute + self.relative * np.abs(recorded)
        within = near & np.isfinite(recorded)  # a share of infinity would permit any distance
        return within | both_nan | (recorded == found)

    def __str__(self) -> str:
        return "bit for bit" if self.exact else f"within {self.absolute:g} + {self.relative:g} x |recorded|"


EXACT = Tolerance()

TOLERANCES = {
    "float64": Tolerance(absolute=1e-6, relative=1e-6),
    "float32": Tolerance(absolute=1e-3, relative=1e-3),
    "bfloat16": Tolerance(absolute=5e-2, relative=5e-2),
    "recomputed": Tolerance(absolute=1e-6, relative=1e-6),
    "another trainer": Tolerance(absolute=1e-3, relative=1e-3),
}
"""Tolerances wherever equality bit for bit is not promised.

- by model.dtype: a step that was trained in another environment; logprobs, losses and the norm of the gradient
- recomputed: the loss, and advantages that need a critic, from recorded inputs: another processor may round the last
  bit of an exponential differently, and values may be recorded in fewer bits than the critic's
- another trainer: advantages and loss in the record of another trainer, which rounds differently throughout, and adds
  another epsilon to a deviation
"""
