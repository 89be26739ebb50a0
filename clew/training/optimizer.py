"""AdamW with its schedule and clipping, on weights of at least 32 bits, whatever type the model computes in."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from clew.config import Training
from clew.errors import TrainingError
from clew.training.sharding import by_mesh, full_tensor, like

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class GradientError(TrainingError):
    """Raised on every rank when a step meets NaN or infinity, or a gradient that spikes (training.spike_factor)."""


class Optimizer:
    """Updates of a model's weights.

    A float32 or float64 model's parameters are updated in place. For a bfloat16 model, float32 masters are updated, and
    rounded into the model after each update; the gradients of micro-batches are summed in the masters. So the model
    computes with exactly the weights that inference gets, and no small update is lost. If a model is sharded over
    ranks, each rank updates its slices.
    """

    def __init__(self, model: nn.Module, training: Training, *, total_updates: int) -> None:
        self.updates = 0
        """Number of updates done."""
        self.total_updates = total_updates
        """Number of updates of the whole run, by which the learning rate is scheduled."""
        self._training = training
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.masters: dict[str, Tensor] = {
            name: parameter if parameter.dtype.itemsize >= 4 else parameter.detach().float().requires_grad_()
            for name, parameter in self._parameters.items()
        }
        """Weights that are updated, by the parameter's name."""
        self._rounded = [name for name, master in self.masters.items() if master is not self._parameters[name]]
        matrices = by_mesh(master for master in self.masters.values() if master.dim() >= 2)
        vectors = by_mesh(master for master in self.masters.values() if master.dim() < 2)
        self._adamw = torch.optim.AdamW(
            [
                *({"params": masters, "decays": True, "weight_decay": training.weight_decay} for masters in matrices),
                *({"params": masters, "decays": False, "weight_decay": 0.0} for masters in vectors),
            ],
            lr=training.lr,
            betas=training.betas,
            fused=True,  # works element by element, so it is as deterministic as the plain one
        )

    def configure(self, training: Training, *, total_updates: int) -> None:
        self._training, self.total_updates = training, total_updates
        for group in self._adamw.param_groups:
            group.update(betas=training.betas, weight_decay=training.weight_decay if group["decays"] else 0.0)

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return learning_rate(self.updates, total=self.total_updates, training=self._training)

    def gather(self) -> None:
        """Move a bfloat16 model's gradients into the masters' float32 sums. Call it after each backward pass."""
        for name in self._rounded:
            gradient = self._parameters[name].grad
            if gradient is not None:
                master = self.masters[name]
                master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
                self._parameters[name].grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Return the gathered gradients by the parameter's name, without those that the loss did not reach."""
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}

    def clip(self) -> float:
        """Scale the gradients down to `max_grad_norm`, and return their norm before that. If it is not finite, the
        gradients are unchanged."""
        norms = [full_tensor(nn.utils.get_total_norm(gradients)) for gradients in by_mesh(self.gradients().values())]
        norm = reduce(torch.hypot, norms) if norms else torch.zeros(())
        if math.isfinite(norm):
            for masters in by_mesh(self.masters.values()):
                nn.utils.clip_grads_with_norm_(masters, self._training.max_grad_norm, norm)
        return float(norm)

    def update(self) -> None:
        """Change the weights, and drop the gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._adamw.step()
        self.forget()
        with torch.no_grad():
            for name in self._rounded:
                self._parameters[name].copy_(self.masters[name])
        self.updates += 1

    def forget(self) -> None:
        """Drop the gathered gradients."""
        for master in self.masters.values():
            master.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on besides the model's weights, as named tensors."""
        state = {
            f"{name}.{moment}": self._adamw.state[master][moment]
            for name, master in self.masters.items()
            for moment in MOMENTS
            if master in self._adamw.state
        }
        return state | {f"{name}.master": self.masters[name].detach() for name in self._rounded}

    def load_state(self, state: dict[str, Tensor], *, updates: int) -> None:
        """Restore what `state` returned after `updates` updates. The model's weights must have been loaded before."""
        self.updates = updates
        for name, master in self.masters.items():
            if name in self._rounded:
                with torch.no_grad():
                    master.copy_(like(master, state[f"{name}.master"]))
            if f"{name}.step" in state:
                moments: dict[str, Any] = {moment: state[f"{name}.{moment}"].clone() for moment in MOMENTS}
                self._adamw.state[master] = {
                    moment: value.to(master.device) if value.dim() == 0 else like(master, value)
                    for moment, value in moments.items()
                }
            else:  # no update has reached it yet
                self._adamw.state.pop(master, None)


def learning_rate(update: int, *, total: int, training: Training) -> float:
    """Return the learning rate of optimizer update number `update` (from 0) of `total`.

    The rate rises in equal steps over `warmup_steps` updates and reaches its peak in the one after them. linear and
    cosine then fall, and would reach 0 in the update after the last.
    """
    warmup = training.warmup_steps
    if update < warmup:
        return training.lr * (update + 1) / (warmup + 1)
    done = min(1.0, (update - warmup) / max(1, total - warmup))
    match training.schedule:
        case "constant":
            return training.lr
        case "linear":
            return training.lr * (1 - done)
        case "cosine":
            return training.lr * (1 + math.cos(math.pi * done)) / 2
