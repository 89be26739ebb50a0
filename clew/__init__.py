"""Clew: asynchronous reinforcement learning for LLM agents; every step leaves a thread back to its cause."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clew.batch import rollout_batch

__all__ = ["rollout_batch"]


def __getattr__(name: str) -> Any:
    """What is public is imported when it is used: importing clew imports no torch."""
    if name == "rollout_batch":
        from clew.batch import rollout_batch

        return rollout_batch
    raise AttributeError(f"module 'clew' has no attribute {name!r}")
