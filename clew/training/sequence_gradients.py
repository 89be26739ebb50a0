"""Computes each sequence's contribution to a step's gradient, and finds the first NaN or infinity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clew.algorithms.losses import PolicyLoss
from clew.training.engine import TrainEngine
from clew.training.optimizer import GradientError
from clew.training.results import Prepared, Updates
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
    """Component of this contribution along the whole gradient, divided by the whole gradient's norm; may be negative.
    The shares of an update add up to 1."""
    where_N: np.ndarray
    """Position of each trained token in the step's arrays. The arrays below have one entry for each of these tokens."""
    logprobs_N: np.ndarray
    losses_N: np.ndarray
    weights_N: np.ndarray
    """Size of the gradient at each token's own logit after temperature: |d loss / d logprob| x (1 - probability)."""
    rejected_N: np.ndarray | None
    """Reason why each token was rejected, see `clew.algorithms.rejection`; None without rejection."""
    first_not_finite: str | None
    """Place where NaN or infinity first appears when the sequence is computed alone; None if all is finite."""


def contributions(engine: TrainEngine, step: Prepared) -> Iterator[Contribution]:
    """Yield the contribution of each sequence to each update of a step.

    Each update is then applied or skipped, as in a real step. After the last one the engine has the weights of the
    next version, or those it had when training.on_bad_gradient=stop ended the step.
    """
    for number, minibatch in enumerate(step.plan):
        trained = sum(step.tokens.trained_in(rows) for rows in minibatch)
        # The whole gradient is computed with the micro-batches of a real step. The sum of the sequences' own gradients,
        # which are computed below, would be rounded differently.
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
        norm_before = engine.optimizer.clip()
        if losses_finite and engine.norm_problem(norm_before) is None:
            engine.recent_norms.append(norm_before)
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
    """Yield the contribution of each sequence to each update of the critic, and apply the updates.

    Without a critic, nothing is yielded.
    """
    if engine.critic is None:
        return
    critic, done = engine.critic, Updates()
    for minibatch in step.plan:
        trained = sum(step.tokens.trained_in(rows) for rows in minibatch)
        for row in sorted(row for rows in minibatch for row in rows if step.tokens.trained_in([row])):
            loss_N = critic.backward(step, engine.policy.micro_batch(step.tokens, [row]), trained, done)
            norm = _norm(critic.optimizer.gradients().values())
            critic.optimizer.forget()
            yield CriticContribution(row=row, loss=float(loss_N.sum()) / trained, gradient_norm=norm)
        try:
            critic.update(step, minibatch, done, engine.version)
        except GradientError:  # the step ended here
            return


def _backward(
    engine: TrainEngine,
    step: Prepared,
    rows: list[int],
    trained: int,
    before: Callable[[MicroBatch, Tensor, Tensor], None] | None = None,
) -> tuple[MicroBatch, Tensor, PolicyLoss]:
    """Add the gradient of these rows to the one that the optimizer holds.

    Args:
        trained: Number of trained tokens that the loss is divided by.
        before: Called before the backward pass with the micro-batch, the logprobs and each token's loss.

    Returns:
        The micro-batch, and the logprobs and the loss of its trained tokens.
    """
    micro = engine.policy.micro_batch(step.tokens, rows)
    if not len(micro.where_N):
        return micro, torch.zeros(0), PolicyLoss(per_token_N=torch.zeros(0), sums={})
    scores = engine.score_micro(micro)
    scores.logprobs_N.retain_grad()
    loss = engine.policy_loss(step, micro, scores)
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

    The place is a parameter, an advantage, a behaviour or reference logprob, a module's output in the forward pass, a
    logprob or loss, or a gradient in the backward pass.
    """
    first = _FirstNotFinite()
    for name, parameter in engine.policy.model.named_parameters():
        first.look(f"the parameter {name}", parameter, ", before the forward pass")
    start, end = int(step.tokens.starts[row]), int(step.tokens.starts[row + 1])
    sequence = step.tokens.ids[row]
    trained_N = np.flatnonzero(step.tokens.loss_mask_S[start:end])
    inputs = {
        "advantage": step.advantages_S,
        "behaviour logprob": step.behaviour_S,
        "reference logprob": step.reference_S,
    }
    for kind, values_S in inputs.items():
        if values_S is not None:
            values_N = torch.as_tensor(values_S[start:end][trained_N])
            first.look_at_tokens(f"the {kind}", values_N, trained_N.tolist(), sequence)
    if first.place is not None:
        return first.place

    def check_loss(micro: MicroBatch, logprobs_N: Tensor, losses_N: Tensor) -> None:
        where_N = (micro.where_N - start).tolist()
        loss = f"loss (algorithm.loss={engine.config.algorithm.loss}; its logprobs are finite)"
        first.look_at_tokens("the logprob", logprobs_N.detach(), where_N, sequence)
        first.look_at_tokens(f"the {loss}", losses_N, where_N, sequence)
        gradient = f"the gradient of the {loss} at the logprob"
        logprobs_N.register_hook(lambda gradient_N: first.look_at_tokens(gradient, gradient_N, where_N, sequence))

    engine.optimizer.forget()
    try:
        with first.watching(engine.policy.model):
            _backward(engine, step, [row], 1, check_loss)
        for name, gradient in engine.optimizer.gradients().items():
            first.look(f"the gradient of {name}", gradient)
    finally:
        engine.optimizer.forget()
    return first.place


class _FirstNotFinite:
    """Looks at one tensor after another, and keeps the place of the first NaN or infinity."""

    def __init__(self) -> None:
        self.place: str | None = None

    def look(self, what: str, tensor: Tensor, when: str = "") -> None:
        if self.place is None and not bool(tensor.isfinite().all()):
            bad = (~tensor.isfinite()).nonzero()
            self.place = f"{what} at {bad[0].tolist()} of {list(tensor.shape)} ({len(bad)} entries){when}"

    def look_at_tokens(self, what: str, values_N: Tensor, where_N: Sequence[int], sequence: str) -> None:
        """Look at one value for each token. `where_N` are the positions of the tokens in the sequence."""
        bad = (~values_N.isfinite()).nonzero()[:, 0].tolist()
        if bad and self.place is None:
            self.place = f"{what} of token {where_N[bad[0]]} of {sequence} ({len(bad)} tokens)"

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Look at the output of every module, and at the gradient of that output."""

        def after_forward(name: str, module: torch.nn.Module, inputs: Any, output: Any) -> None:
            called = f"the output of {name} ({type(module).__name__})"
            for tensor in _tensors(output):
                self.look(called, tensor, ", in the forward pass")
                if tensor.requires_grad:
                    tensor.register_hook(partial(self.look, f"the gradient of {called}", when=", in the backward pass"))

        hooks = [m.register_forward_hook(partial(after_forward, name)) for name, m in model.named_modules() if name]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (tuple, list)):
        for each in output:
            yield from _tensors(each)
