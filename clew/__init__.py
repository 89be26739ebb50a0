"""Clew: asynchronous reinforcement learning for LLM agents; every step leaves a thread back to its cause."""

import os
import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109
    # `python -m clew` searches the current folder first, so a numpy.py in it would be imported and run. Modules that
    # Python imported before this line are out of reach; `clew` and `python -P -m clew` never search that folder.
    del sys.path[0]

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clew.api import Run, open_run, replay, rollout_batch, train
    from clew.config import Config
    from clew.errors import ClewError
    from clew.record.rows import Sequence
    from clew.record.writer import Writer

__all__ = [
    "ClewError",
    "Config",
    "Run",
    "Sequence",
    "Writer",
    "__version__",
    "open_run",
    "replay",
    "rollout_batch",
    "train",
]

__version__ = "0.1.0"

_HOMES = {
    "ClewError": "clew.errors",
    "Config": "clew.config",
    "Run": "clew.api",
    "Sequence": "clew.record.rows",
    "Writer": "clew.record.writer",
    "open_run": "clew.api",
    "replay": "clew.api",
    "rollout_batch": "clew.api",
    "train": "clew.api",
}
"""Module that defines each public name."""


def __getattr__(name: str) -> Any:
    """Import a public name only when it is used, so that `import clew` imports neither torch nor a web server."""
    if name not in _HOMES:
        raise AttributeError(f"module 'clew' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
