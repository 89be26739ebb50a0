"""Loading and calling a user's own loss or advantages, and reporting its mistakes. Works without torch.

A wrong result raises a TrainingError that says what was returned. An exception in the function becomes a TrainingError
with its file and line.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Sequence as SequenceABC
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from clew import dotted
from clew.algorithms import ADVANTAGES, LOSSES, PRESETS, WITH_CRITIC
from clew.config import Algorithm, Config
from clew.errors import ConfigError, TrainingError
from clew.record.batch_digest import digest_rows
from clew.record.rows import Sequence


def code_of(config: Config) -> dict[str, str]:
    """Return the digests of the files that define the user's functions and classes.

    Keys are fields such as "rollout.reward". A file's digest is taken when this process first asks for it.
    """
    digests = {f"algorithm.{stage}": source_of(config.algorithm, stage) for stage in ("advantages", "loss")}
    for name in ("workflow", "agent", "reward"):
        path = getattr(config.rollout, name)
        if path is not None and (file := dotted.file_of(path)) is not None:
            digests[f"rollout.{name}"] = digest_of_file(str(file))
    preset = config.algorithm.preset
    if preset not in (None, *PRESETS) and (file := dotted.file_of(f"{preset}.OPTIONS")) is not None:
        digests["algorithm.preset"] = digest_of_file(str(file))
    return {field: digest for field, digest in digests.items() if digest is not None}


def source_of(algorithm: Algorithm, stage: str) -> str | None:
    """Return the digest of the file with the function for `stage` (advantages or loss); None if that is built in."""
    path, built_in = getattr(algorithm, stage), ADVANTAGES if stage == "advantages" else LOSSES
    return None if path in built_in else UserFunction(path, f"algorithm.{stage}").source


def needs_critic(algorithm: Algorithm) -> bool:
    """Return whether algorithm.advantages takes a critic's values. Raises ConfigError if it names no function."""
    name = algorithm.advantages
    return name in WITH_CRITIC if name in ADVANTAGES else CustomAdvantages(name).takes_values


class UserFunction:
    """A function that the configuration names by its dotted path."""

    def __init__(self, path: str, field: str) -> None:
        """Load the function at `path`, which is the value of `field`. Raises ConfigError if there is none."""
        self.name = f"{field}={path}"
        self._function = dotted.load(path, field)
        self.source = _source(self._function)
        """Digest of the file that defines the function."""
        if inspect.isclass(self._function) or not callable(self._function):
            raise ConfigError(f"{self.name} is {type(self._function).__name__} {path!r}; expected a function.")
        try:
            self.parameters = inspect.signature(self._function).parameters
        except ValueError:  # it is written in C
            raise ConfigError(
                f"Cannot call {self.name}: Python cannot tell which arguments it takes. Wrap it in a function of yours."
            ) from None
        self.required = [
            name
            for name, each in self.parameters.items()
            if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        """Parameters that have no default."""

    def takes(self, count: int) -> bool:
        """Return whether the function can be called with this number of positional arguments."""
        try:
            inspect.signature(self._function).bind(*range(count))
        except TypeError:
            return False
        return True

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function. Raises TrainingError if it raises anything."""
        try:
            return self._function(*arguments, **named)
        except (Exception, SystemExit) as error:
            raise TrainingError(f"{self.name} raised {type(error).__name__} {_places(error)}: {error}") from error


def _source(function: Any) -> str:
    try:
        return digest_of_file(inspect.getsourcefile(inspect.unwrap(function)) or "")
    except TypeError:  # not defined in a Python file
        return ""


@cache
def digest_of_file(file: str) -> str:
    """Return the digest that a file had when this process first asked for it. Later changes do not count."""
    return dotted.digest_of(Path(file))


def _places(error: BaseException) -> str:
    """Return the line of the user's code that raised the error, and the line that called that code if it is another."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    if not frames:
        return "when it was called"
    own = [frame for frame in frames if "site-packages" not in frame.filename and not frame.filename.startswith("<")]
    places = list(dict.fromkeys(f"{frame.filename}:{frame.lineno}" for frame in own or frames))
    return f"in {places[-1]}" + (f", called in {places[0]}" if len(places) > 1 else "")


class CustomAdvantages:
    """Advantages by a user's function, named by a dotted path: `def mine(sequences: list[Sequence]) -> list`.

    The function returns, for each sequence of a step, one number or one number per token, [T]; numbers of untrained
    tokens are ignored. `reward` of a sequence is the reward that is trained on, after penalties.

    A function of three parameters, `def mine(rewards, values, options)`, gets a critic: see `of_values`.
    """

    def __init__(self, path: str) -> None:
        """Load the function. Raises ConfigError if there is none, or it has other parameters."""
        self._function = UserFunction(path, "algorithm.advantages")
        self.takes_values = self._function.takes(3) and not self._function.takes(1)
        """True if the function takes a critic's values, as `clew.algorithms.ppo.advantages` does."""
        if not self.takes_values and not self._function.takes(1):
            raise ConfigError(
                f"algorithm.advantages={path} takes ({', '.join(self._function.parameters)}); expected one parameter, "
                f"the sequences of a step, as in def {path.rpartition('.')[2]}(sequences): ..., or three, for "
                f"advantages with a critic: (rewards, values, options)."
            )

    def __call__(self, sequences: SequenceABC[Sequence]) -> list[np.ndarray]:
        """Return the advantages of each sequence: [] or [T], float32.

        Raises:
            TrainingError: The function raised, changed its input, or did not return finite numbers of these shapes.
        """
        name, before, copy = self._function.name, digest_rows(sequences), list(sequences)
        returned = self._function(copy)
        if list(map(id, copy)) != list(map(id, sequences)) or digest_rows(sequences) != before:
            raise TrainingError(
                f"{name} changed its input: the sequences, or their order, by which its numbers are assigned. Copy a "
                f"sequence before you change it, and use sorted() instead of .sort()."
            )
        expected = f"expected {len(sequences)} entries, one per sequence: a number, or an array with one per token"
        try:
            advantages = [np.asarray(of_row, np.float32) for of_row in returned]
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor that has a gradient
            raise TrainingError(f"{name} returned {_kind(returned)}; {expected}.") from None
        if len(advantages) != len(sequences):
            raise TrainingError(f"{name} returned {len(advantages)} entries; {expected}.")
        bad = []
        for of_row, row in zip(advantages, sequences, strict=True):
            if of_row.shape not in ((), row.loss_mask.shape):
                raise TrainingError(
                    f"{name} returned an array of shape {list(of_row.shape)} for {row.id}; expected a number, or one "
                    f"for each of its tokens: {list(row.loss_mask.shape)}, as its loss_mask."
                )
            if (tokens := np.flatnonzero(row.loss_mask & ~np.isfinite(of_row))).size:
                number = f"{of_row} for" if of_row.ndim == 0 else f"{of_row[tokens[0]]} for token {tokens[0]} of"
                bad.append(f"{number} {row.id} (its reward is {row.reward:g})")
        if bad:
            others = f", and for {len(bad) - 1} more" if bad[1:] else ""
            raise TrainingError(f"{name} returned {bad[0]}{others}; expected finite numbers.")
        return advantages

    def of_values(
        self, rewards: SequenceABC[np.ndarray], values: SequenceABC[np.ndarray], options: Algorithm
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the advantages and the returns of the trained tokens of each sequence: [N] float64.

        Args:
            rewards: Reward of each trained token, [N] for each sequence.
            values: The critic's value of the state in which each was chosen.

        Raises:
            TrainingError: The function raised, changed its input, or did not return finite numbers of these shapes.
        """
        for array in (*rewards, *values):
            array.setflags(write=False)  # changing it in place then raises at the user's line
        returned = self._function(list(rewards), list(values), options)
        name, expected = self._function.name, "expected two lists, advantages and returns, each of"
        try:
            advantages, returns = ([np.asarray(of_row, np.float64) for of_row in kind] for kind in returned)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor that has a gradient
            raise TrainingError(
                f"{name} returned {_kind(returned)}; {expected} {len(rewards)} arrays, one for each of rewards."
            ) from None
        for kind, numbers in (("advantages", advantages), ("returns", returns)):
            if len(numbers) != len(rewards):
                raise TrainingError(f"{name} returned {len(numbers)} {kind}; {expected} {len(rewards)} arrays.")
            for place, (numbers_N, rewards_N) in enumerate(zip(numbers, rewards, strict=True)):
                if numbers_N.shape != rewards_N.shape:
                    raise TrainingError(
                        f"{name} returned {kind} of shape {list(numbers_N.shape)} for rewards[{place}]; expected one "
                        f"for each of its trained tokens: {list(rewards_N.shape)}."
                    )
                if (tokens := np.flatnonzero(~np.isfinite(numbers_N))).size:
                    raise TrainingError(
                        f"{name} returned {kind} of {numbers_N[tokens[0]]} for rewards[{place}][{tokens[0]}]; expected "
                        f"finite numbers."
                    )
        return advantages, returns


def _kind(returned: Any) -> str:
    inner = f" of {type(returned[0]).__name__}" if isinstance(returned, (list, tuple)) and returned else ""
    return type(returned).__name__ + inner
