"""Losses of single tokens, as pure functions on named tensors. The caller takes the mean over tokens.

All tensors have one entry per trained token, [N], and hold natural logarithms. Options that do not need whole sequences
accept any common shape. docs/algorithms.md has the formulas, and explains where implementations differ.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clew.algorithms import LOG_RATIO_LIMIT, LOSSES
from clew.config import Algorithm
from clew.errors import ConfigError, TrainingError
from clew.training.custom import UserFunction


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Loss of each token, and sums for metrics."""

    per_token_N: Tensor
    """Loss of each token, float32, which carries the gradient. The loss of a mini-batch is its mean over all tokens."""
    sums: dict[str, Tensor]
    """Sums over the N tokens; divided by the number of tokens, they are metrics."""


def policy_loss(
    *,
    logprobs_N: Tensor,
    proximal_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
    reference_N: Tensor | None = None,
    entropies_N: Tensor | None = None,
    rows_N: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    loss: str = "clip",
    ratio: str = "token",
    dual_clip: float | None = None,
    importance: str = "token_truncate",
    entropy_coef: float = 0.0,
) -> PolicyLoss:
    """Return the decoupled clipped objective of AReaL (arXiv 2505.24298, equation 5) with a KL term, or a relative of
    it.

    An entropy bonus of entropy_coef x entropy is subtracted (arXiv 1707.06347, equation 9).

    clip:  -weight x min(ratio x A, clip(ratio, 1 - clip_low, 1 + clip_high) x A) + kl_coef x KL(current, reference)
    cispo: -weight x constant(clip(ratio, ...)) x A x log current + ...   (MiniMax-M1, arXiv 2506.13585, equation 4)

    ratio = current / proximal: how far this step has moved the policy, which the clip bounds. It is the token's own, or
    the geometric mean over the token's sequence (GSPO, arXiv 2507.18071, equation 7).

    weight = proximal / behaviour: how much likelier the token, or its whole sequence, was when the step began than when
    it was sampled. It is a constant, truncated or masked. If proximal equals behaviour (no lag) it is 1, and clip is
    GRPO (arXiv 2402.03300).

    The logarithm of a ratio is limited to LOG_RATIO_LIMIT before it is exponentiated; a limited ratio has no gradient.

    Args:
        logprobs_N: Current logprobs. Only they carry a gradient, and with an entropy_coef also entropies_N.
        proximal_N: Logprobs at the start of the step.
        behaviour_N: Logprobs under the weights that sampled the token.
        reference_N: Logprobs under the model that the run began with; None: no KL term.
        entropies_N: Exact entropy of the whole distribution that the token was drawn from; None: no bonus.
        rows_N: Sequence that each token belongs to, counted from 0, int64. Options of whole sequences need it.
        dual_clip: When A < 0, the objective is at least dual_clip x A (arXiv 1912.09729).
    """
    log_ratio_N = logprobs_N - proximal_N
    ratio_N = exp_limited(log_ratio_N if ratio == "token" else sequence_means(log_ratio_N, rows_N))
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    weight_N = importance_weights(proximal_N - behaviour_N, rows_N, importance=importance, cap=importance_cap)
    if loss == "cispo":
        objective_N = clipped_N.detach() * advantages_N * logprobs_N
        clips_N = (clipped_N != ratio_N) & (advantages_N != 0)
    else:
        objective_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
        clips_N = clipped_N * advantages_N < ratio_N * advantages_N
    if dual_clip is not None:
        bounds_N = (advantages_N < 0) & (objective_N < dual_clip * advantages_N)
        bounded_N = torch.maximum(objective_N, dual_clip * advantages_N)
        objective_N = torch.where(advantages_N < 0, bounded_N, objective_N)
        clips_N = clips_N | bounds_N
    loss_N = -weight_N * objective_N
    with torch.no_grad():
        masked = importance.endswith("mask")
        sums = {
            "clip_share": clips_N.sum(),
            "importance_weight": weight_N.sum(),
            "importance_capped_share": (weight_N == 0 if masked else weight_N >= importance_cap).sum(),
        }
    if reference_N is not None:
        kl_N = KL_ESTIMATORS[kl_estimator](logprobs_N, reference_N)
        if kl_coef:
            loss_N = loss_N + kl_coef * kl_N
        sums["kl"] = kl_N.detach().sum()
    if entropies_N is not None and entropy_coef:
        loss_N = loss_N - entropy_coef * entropies_N
    return PolicyLoss(per_token_N=loss_N, sums=sums)


def importance_weights(log_weight_N: Tensor, rows_N: Tensor | None, *, importance: str, cap: float) -> Tensor:
    """Return proximal over behaviour probability of each token, or of its whole sequence (the product over its tokens).

    It is truncated to `cap` (TIS), or set to 0 outside [1/cap, cap] (IcePop, arXiv 2510.18855; MIS).
    """
    level, _, kind = importance.partition("_")
    weight_N = exp_limited(log_weight_N if level == "token" else sequence_sums(log_weight_N, rows_N))
    if kind == "truncate":
        return weight_N.clamp(max=cap)
    return weight_N.masked_fill((weight_N < 1 / cap) | (weight_N > cap), 0.0)


def exp_limited(log_ratio_N: Tensor) -> Tensor:
    """Return exp of the logarithm of a ratio, limited to LOG_RATIO_LIMIT.

    float32 overflows above 88.7, and infinity times an advantage of 0 is NaN. A smaller logarithm is unchanged, bit for
    bit.
    """
    return torch.exp(log_ratio_N.clamp(max=LOG_RATIO_LIMIT))


def sequence_sums(values_N: Tensor, rows_N: Tensor | None) -> Tensor:
    """Return for each token the sum over the tokens of its sequence: [N].

    Args:
        rows_N: Sequence of each token, counted from 0, int64.
    """
    assert rows_N is not None, "an option of whole sequences needs rows_N"
    count = int(rows_N.max()) + 1 if len(rows_N) else 0
    return values_N.new_zeros(count).index_add(0, rows_N, values_N).index_select(0, rows_N)


def sequence_means(values_N: Tensor, rows_N: Tensor | None) -> Tensor:
    """Return for each token the mean over the tokens of its sequence: [N]."""
    return sequence_sums(values_N, rows_N) / sequence_sums(torch.ones_like(values_N), rows_N)


def loss_options(algorithm: Algorithm) -> dict[str, Any]:
    """Return the arguments of `policy_loss` that the configuration sets.

    A KL divergence in the reward has no coefficient in the loss.
    """
    names = (
        "clip_low",
        "clip_high",
        "importance_cap",
        "kl_estimator",
        "ratio",
        "dual_clip",
        "importance",
        "entropy_coef",
    )
    options = {name: getattr(algorithm, name) for name in names}
    return options | {"loss": algorithm.loss, "kl_coef": algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0}


def loss_function(algorithm: Algorithm) -> Callable[..., PolicyLoss]:
    """Return the function that algorithm.loss names, with its options bound.

    Call it with the named tensors of `policy_loss`.

    Raises:
        ConfigError: A dotted path names no function that can be called this way.
    """
    options = loss_options(algorithm)
    return partial(policy_loss if algorithm.loss in LOSSES else CustomLoss(options.pop("loss")), **options)


OPTIONAL = {"reference_N": "algorithm.kl_coef", "entropies_N": "algorithm.entropy_coef"}
"""Inputs that a loss gets only if an option asks for them, and that option."""


class CustomLoss:
    """A user's loss function, named by a dotted path.

    It takes any of `policy_loss`'s arguments except `loss`, by name. It returns a PolicyLoss, or (loss_N, metrics),
    where metrics is a dict of [N] tensors or numbers, recorded as their mean over all tokens.

    The function is called once per micro-batch, which holds whole sequences. Its result must not depend on how these
    are grouped: a token's loss may depend only on the token's own sequence. The engine detects NaN for every loss.
    """

    def __init__(self, path: str) -> None:
        """Load the function.

        Raises:
            ConfigError: There is no such function, or it requires an unknown argument.
        """
        self._function = UserFunction(path, "algorithm.loss")
        offered = [name for name in inspect.signature(policy_loss).parameters if name != "loss"]
        wanted = self._function.parameters.values()
        missing = [p.name for p in wanted if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        if strange := [name for name in missing if name not in offered]:
            near = difflib.get_close_matches(strange[0], offered, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{self._function.name} wants {strange[0]!r}; there are {', '.join(offered)}.{hint}")
        takes_any = any(p.kind is p.VAR_KEYWORD for p in wanted)
        self._takes = set(offered) if takes_any else set(offered) & {p.name for p in wanted}

    def __call__(self, **inputs: Any) -> PolicyLoss:
        """Return the user's loss.

        Raises:
            TrainingError: The function raised, changed its input, or returned something that cannot be a loss.
        """
        name, logprobs_N = self._function.name, inputs["logprobs_N"]
        tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor)}
        before = {key: value._version for key, value in tensors.items()}
        taken = {key: value for key, value in inputs.items() if key in self._takes}
        try:
            returned = self._function(**taken)
        except TrainingError as error:
            absent = [key for key in OPTIONAL if key in taken and taken[key] is None]
            hint = "".join(f". {key} is None without {OPTIONAL[key]}" for key in absent)
            raise TrainingError(f"{error}{hint}") from error
        changed = [key for key, value in tensors.items() if value._version != before[key]]
        if changed:
            raise TrainingError(f"{name} changed its input in place ({', '.join(changed)}). Make a new tensor instead.")
        pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
        loss_N = returned[0] if pair else returned.per_token_N if isinstance(returned, PolicyLoss) else None
        if not isinstance(loss_N, Tensor) or not loss_N.is_floating_point():
            inner = ", ".join(type(each).__name__ for each in returned) if isinstance(returned, tuple) else ""
            found = f"{type(returned).__name__}{f' ({inner})' if inner else ''}"
            raise TrainingError(
                f"{name} returned {found if not isinstance(loss_N, Tensor) else f'a loss of {loss_N.dtype}'}; expected "
                f"(loss_N, metrics): the loss of each token, a tensor of floats, and a dict, which may be empty."
            )
        if loss_N.shape != logprobs_N.shape:
            raise TrainingError(
                f"{name} returned a loss of shape {list(loss_N.shape)}; expected {list(logprobs_N.shape)}: one of each "
                f"token. Clew takes the mean (algorithm.loss_mean)."
            )
        if logprobs_N.requires_grad and loss_N is not logprobs_N and loss_N.grad_fn is None:
            raise TrainingError(
                f"{name} returned a loss without a gradient: it does not depend on logprobs_N, or was detached."
            )
        if isinstance(returned, PolicyLoss):
            return returned
        return PolicyLoss(
            per_token_N=loss_N, sums={f"loss/{key}": self._sum(key, returned[1][key], loss_N) for key in returned[1]}
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
                f"{list(loss_N.shape)} numbers, one a token."
            ) from None


def k1(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """Return KL(p || q) of each token, estimated from a sample of p as log(p/q).

    Its own gradient is 0 on average, so it has no effect in a loss; it belongs in the reward. Schulman,
    http://joschu.net/blog/kl-approx.html

    Args:
        logprobs_N: log p.
        other_N: log q.
    """
    return logprobs_N - other_N


def k2(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """Return KL(p || q) per token, estimated as log(p/q)^2 / 2. Biased, but its gradient on samples of p is not."""
    return 0.5 * (logprobs_N - other_N) ** 2


def k3(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """Return KL(p || q) of each token, estimated as q/p - log(q/p) - 1: unbiased, never negative, zero where p = q.

    expm1 keeps what exp(x) - 1 would round away: in float32, for p and q that differ by less than 1e-4, the sum would
    be noise of either sign. log(q/p) is limited to LOG_RATIO_LIMIT.
    """
    log_ratio_N = (other_N - logprobs_N).clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(log_ratio_N) - log_ratio_N


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def value_loss(values_N: Tensor, old_N: Tensor, returns_N: Tensor, clip: float | None) -> Tensor:
    """Return half the squared distance of each value from its return, or of its clipped value if that is further: [N].

    1/2 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2), as in PPO's code (arXiv 2005.12729).

    Args:
        values_N: Current values, which carry the gradient.
        old_N: Values when the step began.
        clip: Largest change of a value; None: no clip.
    """
    squares_N = (values_N - returns_N) ** 2
    if clip is not None:
        held_N = old_N + (values_N - old_N).clamp(-clip, clip)
        squares_N = torch.maximum(squares_N, (held_N - returns_N) ** 2)
    return squares_N / 2


def dpo_loss(
    chosen_P: Tensor, rejected_P: Tensor, reference_chosen_P: Tensor, reference_rejected_P: Tensor, *, beta: float
) -> Tensor:
    """Return the DPO loss of each pair, [P] (arXiv 2305.18290, equation 7).

    It is -log sigmoid(beta (log pi/pi_ref of the chosen - log pi/pi_ref of the rejected)). All inputs are logprobs of
    whole completions, summed over their tokens.
    """
    margin_P = (chosen_P - reference_chosen_P) - (rejected_P - reference_rejected_P)
    return -torch.nn.functional.logsigmoid(beta * margin_P)


def preference_loss(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """Return -log sigmoid(score of the chosen - score of the rejected) of each pair, [P].

    This is Bradley and Terry's model, with which reward models are trained (InstructGPT, arXiv 2203.02155, equation 1).
    """
    return -torch.nn.functional.logsigmoid(chosen_P - rejected_P)


def supervised_loss(logprobs_N: Tensor) -> Tensor:
    """Return the cross-entropy of each token of a demonstration, in nats."""
    return -logprobs_N
