"""All seeds follow from the run's, `seed` of the configuration."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, name: str) -> int:
    """A seed that follows from the run's and the ID of a thing, in 63 bits; the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
