"""The user's reward function, `(completion, data) -> number or named numbers`, plain or async.

TRL's signature, `(prompts, completions, **columns) -> list`, is recognised by its parameter `completions`.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Collection
from typing import Any

from clew import dotted
from clew.errors import ConfigError, EpisodeError

Reward = float | dict[str, float]
"""Reward of an episode, from a reward function or a workflow; the total of named numbers is their sum."""


class RewardFunction:
    """The user's function, with either signature. Imports only the user's module, so that a worker starts quickly."""

    def __init__(self, path: str, prompt_column: str) -> None:
        """Import the function.

        Args:
            prompt_column: Column of the data that TRL's functions get as `prompts`.

        Raises:
            ConfigError: There is no such function, or it cannot be called with these arguments.
        """
        self.path = path
        self.prompt_column = prompt_column
        self._function = dotted.load(path, "rollout.reward")
        if inspect.isclass(self._function) or not callable(self._function):
            name = getattr(self._function, "__name__", "")
            raise ConfigError(
                f"rollout.reward={path} is {type(self._function).__name__} {name!r}; expected a function "
                f"(completion, data) -> number."
            )
        self._parameters = inspect.signature(self._function).parameters
        self.trl = "completions" in self._parameters
        self.is_async = inspect.iscoroutinefunction(self._function)
        if not self.trl:
            try:
                inspect.signature(self._function).bind("", {})
            except TypeError as error:
                raise ConfigError(
                    f"rollout.reward={path} cannot be called as (completion, data): {error}. Expected "
                    f"def {path.rpartition('.')[2]}(completion: str, data: dict) -> float, or TRL's "
                    f"(prompts, completions, **columns) -> list."
                ) from None

    def __call__(self, completion: str, data: dict[str, Any]) -> Reward:
        """Call a plain function. Raises its own exceptions, and EpisodeError if it returns no reward, see `checked`."""
        return self._checked(self._call(completion, data), data)

    async def awaited(self, completion: str, data: dict[str, Any]) -> Reward:
        return self._checked(await self._call(completion, data), data)

    def _call(self, completion: str, data: dict[str, Any]) -> Any:
        if not self.trl:
            return self._function(completion, data)
        prompt = data[self.prompt_column]
        chat = isinstance(prompt, list)
        said = [{"role": "assistant", "content": completion}] if chat else completion
        columns = {name: [value] for name, value in data.items()}
        columns |= {"prompts": [prompt], "completions": [said]}
        if not any(p.kind is p.VAR_KEYWORD for p in self._parameters.values()):
            columns = {name: value for name, value in columns.items() if name in self._parameters}
        return self._function(**columns)

    def _checked(self, value: Any, data: dict[str, Any]) -> Reward:
        what = f"reward {self.path}"
        if self.trl:
            if not isinstance(value, (list, tuple)) or len(value) != 1:
                raise EpisodeError(
                    f"{what} returned {shortened(value)}; expected a list with one number a completion, "
                    f"here 1. The data row: {shortened(data, 400)}"
                )
            value = value[0]
        return checked(value, what, f" The data row: {shortened(data, 400)}")


def checked(value: Any, what: str, where: str = "") -> Reward:
    """Return `value` as a float, or as named floats.

    Args:
        value: The value that a reward function, workflow or agent (`what`) returned.
        where: Sentence that ends the message.

    Raises:
        EpisodeError: It is neither a finite number nor a dict of named finite numbers.
    """
    if isinstance(value, dict):
        if not value or not all(isinstance(name, str) for name in value):
            raise EpisodeError(f"{what} returned {shortened(value)}; expected at least one number, by name.{where}")
        return {name: _number(each, f"{what} returned {name}:", where) for name, each in value.items()}
    return _number(value, f"{what} returned", where)


def reward_of_agent(returned: Any, what: str, *, ids: Collection[str], own: dict[str, float]) -> Reward:
    """Return the reward of an agent's episode, and put the rewards that it returned for single responses into `own`.

    Args:
        returned: The value that the agent (`what`) returned: a number, a dict of numbers by response ID, or None.
        ids: IDs of the episode's responses.
        own: Rewards by response ID, with those that the agent has set already. They may stand for the episode's.

    Raises:
        EpisodeError: It returned anything else, or a reward for a response that is not in the episode.
    """
    if isinstance(returned, dict):
        if unknown := [id for id in returned if id not in ids]:
            raise EpisodeError(
                f"{what} returned a reward for {unknown[0]!r}, which is not the id of any response in this episode "
                f"(ids: {', '.join(sorted(ids)) or 'none'}). Use a response's `id` as the key."
            )
        own.update(by_name(checked(returned, what)) if returned else {})
    if own and (returned is None or isinstance(returned, dict)):
        return 0.0
    return checked(returned, what)


def total(reward: Reward) -> float:
    """Return the number that is trained on."""
    return math.fsum(reward.values()) if isinstance(reward, dict) else reward


def by_name(reward: Reward) -> dict[str, float]:
    """Return the reward as named numbers, whose sum is the total."""
    return reward if isinstance(reward, dict) else {"reward": reward}


def shortened(value: Any, limit: int = 200) -> str:
    """Return `repr` of the value, cut in the middle when it is longer than `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"


def _number(value: Any, returned: str, where: str) -> float:
    plain = value
    if hasattr(value, "item"):  # a scalar of NumPy or torch, neither of which is imported here
        try:
            plain = value.item()
        except (ValueError, RuntimeError):  # an array of several
            plain = None
    if isinstance(plain, numbers.Real) and math.isfinite(plain):
        return float(plain)
    raise EpisodeError(
        f"{returned} {shortened(value)} ({type(value).__name__}); expected a finite number or a dict of "
        f"named finite numbers.{where}"
    )
