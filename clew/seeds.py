"""Derivation of seeds. Every seed of a run derives from `seed` in the configuration."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, name: str) -> int:
    """Return a 63-bit seed that derives from the run's seed and an ID. It is the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
