"""Clew: asynchronous reinforcement learning for LLM agents; every step leaves a thread back to its cause."""

import os
import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109
    # `python -m clew` looks for modules in the current folder first: a numpy.py that lies there would run. What Python
    # imports before this line cannot be helped; `clew` and `python -P -m clew` never look there.
    del sys.path[0]

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clew.batch import rollout_batch

__all__ = ["__version__", "rollout_batch"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import public functions only when they are used, so that importing clew imports no torch."""
    if name == "rollout_batch":
        from clew.batch import rollout_batch

        return rollout_batch
    raise AttributeError(f"module 'clew' has no attribute {name!r}")
