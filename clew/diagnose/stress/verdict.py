"""What the stress says about an agent: a finding, where it is, and the numbers that it rests on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["hangs", "blocks", "serial", "shared", "growth", "differs", "fails"]
"""hangs: episodes that do not end. blocks: calls that block the event loop. serial: something admits only so many at a
time. shared: state shared between episodes. growth: something grows with every episode. differs: the same seeds, other
results. fails: episodes that fail."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One finding."""

    kind: Kind
    what: str
    """In a sentence."""
    where: str = ""
    """File, line and function; or an attribute's name."""
    evidence: list[str] = field(default_factory=list)
    certain: bool = True
    """False: a suspicion, which may be meant so (a cache, a counter). It does not make an agent unfit."""
