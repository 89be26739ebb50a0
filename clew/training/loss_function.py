"""The loss function that algorithm.loss names: a page of clew/algorithms, or a user's own.

docs/algorithms.md has the formulas, and explains where implementations differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from clew.algorithms import LOSSES, page
from clew.algorithms.losses import PolicyLoss, TrainedTokens, loss_kl_coef
from clew.algorithms.rejection import rejections, rejects
from clew.config import Algorithm
from clew.errors import ConfigError, TrainingError, did_you_mean
from clew.training.custom import UserFunction

Loss = Callable[[TrainedTokens], PolicyLoss]


def loss_function(algorithm: Algorithm) -> Loss:
    """Return the function that algorithm.loss names, with a loss of 0 for rejected tokens.

    Raises:
        ConfigError: A dotted path names no function that can be called this way.
    """
    if algorithm.loss in LOSSES:
        loss: Loss = partial(page(LOSSES[algorithm.loss]).loss, options=algorithm)
    else:
        loss = CustomLoss(algorithm)
    return partial(_of_kept, loss, algorithm) if rejects(algorithm) else loss


def _of_kept(loss: Loss, algorithm: Algorithm, tokens: TrainedTokens) -> PolicyLoss:
    """Return a loss that is 0 where a token is rejected. NaN stays NaN: a rejection must not hide it."""
    everything, rejected_N = loss(tokens), rejections(tokens, algorithm)
    return replace(everything, per_token_N=everything.per_token_N * (rejected_N == 0), rejected_N=rejected_N)


OPTIONS = (
    "clip_low", "clip_high", "dual_clip", "ratio", "importance", "importance_cap", "kl_estimator", "entropy_coef",
)  # fmt: skip
"""Options that a user's loss may take by name, besides kl_coef."""

OPTIONAL = {"reference_N": "algorithm.kl_coef", "entropies_N": "algorithm.entropy_coef"}
"""Inputs that a loss gets only if an option asks for them, each with the name of that option."""


class CustomLoss:
    """A user's loss function, named by a dotted path.

    It takes, by name, any fields of `TrainedTokens`, any of `OPTIONS`, kl_coef, tokens and options. It returns a
    PolicyLoss, or (loss_N, metrics), where metrics is a dict of [N] tensors or numbers, recorded as their mean over all
    tokens.

    The function is called once per micro-batch, which holds whole sequences. Its result must not depend on how these
    are grouped: a token's loss may depend only on the token's own sequence. The engine detects NaN for every loss.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        """Load the function that algorithm.loss names.

        Raises:
            ConfigError: There is no such function, or it requires an unknown argument.
        """
        self._function = UserFunction(algorithm.loss, "algorithm.loss")
        self._algorithm = algorithm
        self._options = {name: getattr(algorithm, name) for name in OPTIONS} | {"kl_coef": loss_kl_coef(algorithm)}
        offered = [*(field.name for field in fields(TrainedTokens)), *self._options, "tokens", "options"]
        wanted = self._function.parameters.values()
        if strange := [name for name in self._function.required if name not in offered]:
            raise ConfigError(
                f"Cannot call {self._function.name}: it has a parameter {strange[0]!r}, and a loss is given "
                f"{', '.join(offered)}.{did_you_mean(strange[0], offered)}"
            )
        takes_any = any(p.kind is p.VAR_KEYWORD for p in wanted)
        self._takes = set(offered) if takes_any else set(offered) & {p.name for p in wanted}

    def __call__(self, tokens: TrainedTokens) -> PolicyLoss:
        """Return the user's loss.

        Raises:
            TrainingError: The function raised, changed its input, or returned something that cannot be a loss.
        """
        name, logprobs_N, tensors = self._function.name, tokens.logprobs_N, vars(tokens)
        before = {key: value._version for key, value in tensors.items() if value is not None}  # counts changes in place
        inputs = {**tensors, **self._options, "tokens": tokens, "options": self._algorithm}
        taken = {key: value for key, value in inputs.items() if key in self._takes}
        try:
            returned = self._function(**taken)
        except TrainingError as error:
            absent = [key for key in OPTIONAL if key in taken and taken[key] is None]
            hint = "".join(f". {key} is None without {OPTIONAL[key]}" for key in absent)
            raise TrainingError(f"{error}{hint}") from error
        changed = [key for key in before if tensors[key]._version != before[key]]
        if changed:
            raise TrainingError(f"{name} changed its input in place ({', '.join(changed)}). Make a new tensor instead.")
        loss_N = self._loss_in(returned)
        if loss_N.shape != logprobs_N.shape:
            raise TrainingError(
                f"{name} returned a loss of shape {list(loss_N.shape)}; expected {list(logprobs_N.shape)}: one per "
                f"token. Clew takes the mean (algorithm.loss_mean)."
            )
        if logprobs_N.requires_grad and loss_N is not logprobs_N and loss_N.grad_fn is None:
            raise TrainingError(
                f"{name} returned a loss without a gradient: it does not depend on logprobs_N, or was detached."
            )
        if isinstance(returned, PolicyLoss):
            for key, value in returned.sums.items():
                is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
                if key == "loss" or not is_number:
                    raise TrainingError(
                        f"{name} returned sums[{key!r}]; expected one number, the sum over the tokens, and another "
                        f"name than loss, which Clew computes itself."
                    )
            return returned
        return PolicyLoss(
            per_token_N=loss_N, sums={f"loss/{key}": self._sum(key, returned[1][key], loss_N) for key in returned[1]}
        )

    def _loss_in(self, returned: Any) -> Tensor:
        """Return the loss of each token in what the function returned. Raises TrainingError if there is none."""
        loss_N = None
        if isinstance(returned, PolicyLoss):
            loss_N = returned.per_token_N
        elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            loss_N = returned[0]
        if isinstance(loss_N, Tensor) and loss_N.is_floating_point():
            return loss_N
        if isinstance(loss_N, Tensor):
            found = f"a loss of {loss_N.dtype}"
        else:
            inner = ", ".join(type(each).__name__ for each in returned) if isinstance(returned, tuple) else ""
            found = f"{type(returned).__name__}{f' ({inner})' if inner else ''}"
        raise TrainingError(
            f"{self._function.name} returned {found}; expected (loss_N, metrics): the loss of each token, a tensor of "
            f"floats, and a dict, which may be empty."
        )

    def _sum(self, key: str, value: Any, loss_N: Tensor) -> Tensor:
        """Return a metric's sum over the tokens; a single number counts once per token."""
        try:
            each = torch.as_tensor(value, dtype=torch.float32).detach()
            return each.expand(loss_N.shape).sum()
        except (TypeError, ValueError, RuntimeError):
            raise TrainingError(
                f"{self._function.name} returned the metric {key!r} as {type(value).__name__} "
                f"{list(value.shape) if isinstance(value, Tensor) else value!r}; expected a number, or "
                f"a tensor of shape {list(loss_N.shape)}, one number per token."
            ) from None
