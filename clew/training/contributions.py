"""The contribution of each sequence of a step to its gradient, and the place where NaN or infinity first appears."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clew.algorithms.losses import PolicyLoss
from clew.training.critic import Fitted
from clew.training.engine import TrainEngine
from clew.training.optimizer import GradientError
from clew.training.results import Prepared
from clew.training.tokens import MicroBatch


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """One sequence's part in one update."""

    row: int
    """Row of the sequence in the batch."""
    update: int
    loss: float
    """Part of the update's loss that comes from this sequence; the parts add up to the loss."""
    gradient_norm: float
    """Norm of this sequence's contribution to the gradient."""
    share: float
    """Component of this contribution along the whole gradient, divided by the whole gradient's norm. The shares of an
    update add up to 1."""
    where_N: np.ndarray
    """Position of each trained token in the step's arrays; aligned with the three arrays below."""
    logprobs_N: np.ndarray
    losses_N: np.ndarray
    weights_N: np.ndarray
    """Gradient at each token's own logit after temperature: |d loss / d logprob| x (1 - probability)."""
    rejected_N: np.ndarray | None
    """Reason for which each token was rejected, see `clew.algorithms.rejection`; None without rejection."""
    first_not_finite: str | None
    """Place where NaN or infinity first appears when the sequence is computed alone; None if nothing is NaN or
    infinite."""


def contributions(engine: TrainEngine, step: Prepared) -> Iterator[Contribution]:
    """Yield the contribution of each sequence to each update of a step.

    Each update is also applied or skipped, as in a real step. Afterwards the engine has the weights of the next
    version, or those at which training.on_bad_gradient=stop ended the step. The gradient of a whole mini-batch is
    computed first, as in a real step, then that of each sequence alone.
    """
    for number, minibatch in enumerate(step.plan):
        trained = sum(step.tokens.trained_in(rows) for rows in minibatch)
        for rows in filter(None, minibatch):
            _backward(engine, step, rows, trained)
        whole = {name: grad.clone() for name, grad in engine.optimizer.gradients().items()}
        norm = _norm(whole.values())
        losses_finite = True
        for row in sorted(row for rows in minibatch for row in rows):
            engine.optimizer.forget()
            part = _contribution(engine, step, row, number, trained, whole, norm)
            losses_finite = losses_finite and math.isfinite(part.loss)
            yield part
        for name, grad in whole.items():
            engine.optimizer.masters[name].grad = grad
        clipped = engine.optimizer.clip()
        if losses_finite and engine.norm_problem(clipped) is None:
            engine.recent_norms.append(clipped)
            engine.optimizer.update()
            continue
        engine.optimizer.forget()
        if engine.config.training.on_bad_gradient == "stop":
            return


@dataclass(frozen=True, kw_only=True)
class CriticContribution:
    """One sequence's part in one update of the critic."""

    row: int
    loss: float
    gradient_norm: float


def critic_contributions(engine: TrainEngine, step: Prepared) -> Iterator[CriticContribution]:
    """Yield the contribution of each sequence to each update of the critic, and apply the updates. Yield nothing
    without a critic."""
    if engine.critic is None or step.values_S is None or step.returns_S is None:
        return
    critic, old_S, returns_S, done = engine.critic, step.values_S, step.returns_S, Fitted()
    for minibatch in step.plan:
        trained = sum(step.tokens.trained_in(rows) for rows in minibatch)
        for row in sorted(row for rows in minibatch for row in rows if step.tokens.trained_in([row])):
            loss_N = critic.backward(engine.policy.micro_batch(step.tokens, [row]), old_S, returns_S, trained, done)
            norm = _norm(critic.optimizer.gradients().values())
            critic.optimizer.forget()
            yield CriticContribution(row=row, loss=float(loss_N.sum()) / trained, gradient_norm=norm)
        try:
            critic.update(step.tokens, minibatch, old_S, returns_S, done, step=engine.version)
        except GradientError:  # the step ended here
            return


def _backward(
    engine: TrainEngine,
    step: Prepared,
    rows: list[int],
    trained: int,
    before: Callable[[MicroBatch, Tensor, Tensor], None] | None = None,
) -> tuple[MicroBatch, Tensor, PolicyLoss]:
    """Add the gradient of these rows to the optimizer's.

    Args:
        before: Called with the micro-batch, its logprobs and its losses, before the backward pass.

    Returns:
        The micro-batch, and the logprobs and the loss of its trained tokens.
    """
    micro = engine.policy.micro_batch(step.tokens, rows)
    if not len(micro.where_N):
        return micro, torch.zeros(0), PolicyLoss(per_token_N=torch.zeros(0), sums={})
    scores = engine.score_micro(micro)
    scores.logprobs_N.retain_grad()
    loss = step.loss_of(micro, scores)
    if before is not None:
        before(micro, scores.logprobs_N, loss.per_token_N.detach())
    (loss.per_token_N.sum() / trained).backward()
    engine.optimizer.gather()
    return micro, scores.logprobs_N, loss


def _contribution(
    engine: TrainEngine, step: Prepared, row: int, update: int, trained: int, whole: dict[str, Tensor], norm: float
) -> Contribution:
    micro, logprobs_N, of_row = _backward(engine, step, [row], trained)
    losses_N = of_row.per_token_N.detach()
    own = engine.optimizer.gradients()
    along = sum(float((grad.double() * whole[name].double()).sum()) for name, grad in own.items())
    pull_N = torch.zeros(0) if logprobs_N.grad is None else logprobs_N.grad.abs() * -torch.expm1(logprobs_N.detach())
    own_norm, loss = _norm(own.values()), float(losses_N.sum()) / max(1, trained)
    return Contribution(
        row=row,
        update=update,
        loss=loss,
        gradient_norm=own_norm,
        share=along / norm**2 if norm else 0.0,
        where_N=micro.where_N,
        logprobs_N=logprobs_N.detach().cpu().numpy(),
        losses_N=losses_N.cpu().numpy(),
        weights_N=pull_N.cpu().numpy(),
        rejected_N=None if of_row.rejected_N is None else of_row.rejected_N.cpu().numpy(),
        first_not_finite=None if math.isfinite(own_norm + loss) else first_not_finite(engine, step, row),
    )


def _norm(gradients: Any) -> float:
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in gradients))


def first_not_finite(engine: TrainEngine, step: Prepared, row: int) -> str | None:
    """Return where NaN or infinity first appears when this sequence is computed; None if everything is finite.

    The place is a parameter, a module's output in the forward pass, a recorded input of the loss, a logprob or loss, or
    a gradient in the backward pass.
    """
    for name, parameter in engine.policy.model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"the parameter {name}{_place(parameter)}, before the forward pass"
    found: list[str] = []

    def forward_hook(name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if not found and not bool(tensor.isfinite().all()):
                    found.append(f"the output of {name} ({type(module).__name__}){_place(tensor)}, in the forward pass")
                if tensor.requires_grad:
                    tensor.register_hook(gradient_hook(name, type(module).__name__))

        return hook

    def gradient_hook(name: str, kind: str) -> Any:
        def hook(gradient: Tensor) -> None:
            if not found and not bool(gradient.isfinite().all()):
                found.append(f"the gradient of the output of {name} ({kind}){_place(gradient)}, in the backward pass")

        return hook

    def check_loss(micro: MicroBatch, logprobs_N: Tensor, losses_N: Tensor) -> None:
        def check(what: str, values_N: Tensor) -> None:
            bad = (~values_N.isfinite()).nonzero()[:, 0].tolist()
            if bad and not found:
                at = int(micro.where_N[bad[0]]) - int(step.tokens.starts[row])
                found.append(f"the {what} of token {at} of {step.tokens.ids[row]} ({len(bad)} tokens)")

        loss = f"loss (algorithm.loss={engine.config.algorithm.loss}; its logprobs are finite)"
        check("logprob", logprobs_N.detach())
        check(loss, losses_N)
        logprobs_N.register_hook(lambda gradient_N: check(f"gradient of the {loss} at the logprob", gradient_N))

    handles = [
        module.register_forward_hook(forward_hook(name)) for name, module in engine.policy.model.named_modules() if name
    ]
    try:
        engine.optimizer.forget()
        span = slice(int(step.tokens.starts[row]), int(step.tokens.starts[row + 1]))
        for kind, values_S in (
            ("advantage", step.advantages_S),
            ("reference logprob", step.reference_S),
        ):
            bad = [] if values_S is None else np.flatnonzero(~np.isfinite(values_S[span]))
            if len(bad):
                return f"the {kind} of token {bad[0]} of {step.tokens.ids[row]}"
        _backward(engine, step, [row], 1, check_loss)
        for name, gradient in engine.optimizer.gradients().items():
            if not found and not bool(gradient.isfinite().all()):
                found.append(f"the gradient of {name}{_place(gradient)}")
    finally:
        for handle in handles:
            handle.remove()
        engine.optimizer.forget()
    return found[0] if found else None


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (tuple, list)):
        for each in output:
            yield from _tensors(each)


def _place(tensor: Tensor) -> str:
    """Return the index of the first entry that is not finite, and the number of such entries, as text."""
    bad = (~tensor.isfinite()).nonzero()
    return f" at {bad[0].tolist()} of {list(tensor.shape)} ({len(bad)} entries)"
