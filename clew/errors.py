"""Errors that Clew raises on purpose.

::

    ClewError
    ├── ConfigError        a field, a file or an override that is invalid
    ├── DataError          the user's data set: a missing file, a missing column, too few rows
    ├── ModelError         the model folder: no weights, no tokenizer, another architecture
    ├── RecordError        the run directory: truncated, of a newer format, held by another trainer
    │   └── FileMissing    a file that does not exist; also a FileNotFoundError (see clew.reading)
    ├── EngineError        the inference side: unreachable, refused a request, wrong weights, a port in use
    │   └── ImageError     an image that cannot be read, or whose tokens are not where they belong
    ├── EpisodeError       one episode failed: workflow, agent or reward; it becomes part of the record
    ├── RolloutError       too many episodes failed, or no batch can ever be formed
    ├── TrainingError      a step cannot be trained: NaN, too little memory, rows that do not fit the model
    ├── LaunchError        a process died, hangs, or cannot be looked at
    ├── MissingPart        an optional part of Clew that is not installed, such as clew[train]
    └── Interrupted        somebody asked the process to end before its work was done

Narrower kinds are defined in the module that raises them, such as those of EngineError in clew.inference.protocol.

A message says what was found, where, what was expected and what to do. The command line prints it without a
traceback and exits with 2, or with 130 after an Interrupted. A programmer's mistake is an ``assert``.
"""

import difflib
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from clew.printing import sentence

EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "safetensors", "datasets", "jinja2"), "train"),
    **dict.fromkeys(("aiohttp", "fastapi", "uvicorn", "PIL"), "train"),
    "httpx2": "agents",
    "peft": "lora",
    **dict.fromkeys(("matplotlib", "tensorboard"), "plots"),
    "pandas": "pandas",
}
"""Extra of pyproject.toml that installs each optional package."""


DEFECT = 70
"""Exit code after an error that Clew did not raise on purpose."""


class ClewError(Exception):
    """Base class of the errors that the user can fix."""


class ConfigError(ClewError):
    """Raised when the configuration contradicts itself, or names something that does not exist."""


class DataError(ClewError):
    """Raised when the data set cannot be read, or lacks what the configuration asks for."""


class ModelError(ClewError):
    """Raised when the model folder cannot be loaded."""


class RecordError(ClewError):
    """Raised when the run directory cannot be read or written, or another process is using it."""


class EngineError(ClewError):
    """Raised when an inference engine cannot be reached, refuses a request, or disagrees with the trainer."""


class ImageError(EngineError):
    """Raised when an image cannot be shown to the model: it is unreadable, or its tokens are not where they belong."""


class EpisodeError(ClewError):
    """Raised when an episode fails. The error is recorded with the episode and does not end the run by itself."""


class RolloutError(ClewError):
    """Raised when rollout cannot continue: too many episodes failed, or no batch can ever be formed."""


class TrainingError(ClewError):
    """Raised when a step cannot be trained: NaN, too little memory, or rows that do not fit the model."""


class LaunchError(ClewError):
    """Raised when a process cannot be started or looked at, died, or hangs."""


class Interrupted(ClewError):
    """Raised when somebody asks the process to end before its work is done."""


class MissingPart(ClewError):
    """Raised when an optional package is needed that is not installed."""


@contextmanager
def explain_missing() -> Iterator[None]:
    """Turn the block's ModuleNotFoundError for an optional package into a MissingPart that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        extra = f"clew[{EXTRAS[package]}]"
        raise MissingPart(
            f"Cannot do this without {package}, which is not installed. Install it with: pip install '{extra}' (in a "
            f'checkout: pip install ".[{EXTRAS[package]}]").'
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none, ending with a full stop."""
    return sentence((str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:"))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return " Did you mean …?" with the valid name closest to `name`, to end a message; "" if none is close."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def described(error: BaseException) -> str:
    """Return the type of an error, the line that raised it, and the first line of its message."""
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(raised.filename).name}:{raised.lineno}: {first_line(error)}"
