"""The critic of PPO: a separate model, with its own optimizer, that predicts the return from each token on.

Its updates depend on the policy only through the values and returns at the beginning of a step. So the two are trained
one after the other, on the same mini-batches and micro-batches.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clew.algorithms.value_loss import value_loss
from clew.config import Algorithm, Config, Training
from clew.errors import ModelError
from clew.models.loading import load_tokenizer, load_value_model
from clew.training.batching import Plan
from clew.training.optimizer import GradientError, Optimizer
from clew.training.policy import Policy
from clew.training.results import Prepared, Updates
from clew.training.scoring import ValueModel
from clew.training.sharded_digest import digest_tensors
from clew.training.sharding import prepare_for_training
from clew.training.tokens import MicroBatch, Tokens


class Critic:
    """The value model and its optimizer. The model stays in eval mode, like the policy."""

    def __init__(self, config: Config, policy: Policy) -> None:
        """Load the critic, to be trained on the policy's micro-batches.

        Raises:
            ModelError: The critic cannot be loaded, or its tokens differ from the policy's.
        """
        field = "algorithm.critic" if config.algorithm.critic else "model.path"
        path = config.algorithm.critic or config.model.path
        self._policy = policy
        self.inner = load_value_model(path, config.model.dtype, policy.loading_device, field)
        """The model in transformers' form."""
        _check_same_tokens(self.inner, path, policy.tokenizer, policy.vocabulary)
        self.model = ValueModel(self.inner)
        prepare_for_training(self.inner, config.training, policy.ranks, policy.device, root=self.model)
        self._training, self._algorithm = config.training, config.algorithm
        total = config.training.steps * config.algorithm.minibatches
        self.optimizer = Optimizer(self.inner, self._own(config.training), total_updates=total)

    def configure(self, training: Training, algorithm: Algorithm) -> None:
        self._training, self._algorithm = training, algorithm
        self.optimizer.configure(self._own(training), total_updates=training.steps * algorithm.minibatches)

    def values(self, tokens: Tokens, plan: Plan) -> np.ndarray:
        """Return the value of the state in which each trained token was chosen, [S]; same micro-batches as `fit`."""
        return self._policy.compute_all(tokens, plan, self._values)

    def after_last(self, tokens: Tokens, plan: Plan, chosen_R: np.ndarray) -> np.ndarray:
        """Return the value of the state after the last trained token of each chosen row, at that token; else 0: [S]."""
        found_S = self._policy.zeros(tokens)
        if not chosen_R.any():
            return found_S
        # A forward pass of its own: if `values` computed these states too, its shapes would differ from those of older
        # runs, which would then no longer replay bit for bit.
        after_S = self._policy.compute_all(tokens, plan, partial(self._values, before=0))
        trained = np.flatnonzero(tokens.loss_mask_S)
        rows = tokens.row_of_S[trained]
        last = trained[np.append(rows[1:] != rows[:-1], True)[: len(rows)]]
        chosen = last[chosen_R[tokens.row_of_S[last]]]
        found_S[chosen] = after_S[chosen]
        return found_S

    def fit(self, step: Prepared, version: int) -> Updates:
        """Make one update per mini-batch of the step at `version`, on the mean value loss of its trained tokens.

        Raises:
            GradientError: A gradient is not finite, and training.on_bad_gradient is "stop".
        """
        done = Updates()
        for minibatch in step.plan:
            self.update(step, minibatch, done, version)
        done.sums.update(self._policy.ranks.add_up_named(done.sums))
        return done

    def update(self, step: Prepared, minibatch: list[list[int]], done: Updates, version: int) -> None:
        """Make one of the updates of `fit`, and add its results to `done`."""
        trained = sum(step.tokens.trained_in(rows) for rows in minibatch)
        for micro in self._policy.own_micro_batches(step.tokens, minibatch):
            self.backward(step, micro, trained, done)
        done.gradients.append(digest_tensors(self.optimizer.gradients().items(), self._policy.ranks))
        done.norms.append(self.optimizer.clip())
        if math.isfinite(done.norms[-1]):
            self.optimizer.update()
            return
        self.optimizer.forget()
        if self._training.on_bad_gradient == "stop":
            raise GradientError(
                f"step {version}: the norm of the critic's gradient is {done.norms[-1]}. This update was not made. "
                f"Perhaps algorithm.critic_lr is too high; with training.on_bad_gradient=skip the run goes on "
                f"without such updates."
            )
        done.skipped += 1

    def backward(self, step: Prepared, micro: MicroBatch, trained: int, done: Updates) -> Tensor:
        """Accumulate the gradient of a micro-batch, and add its sums to `done`. Return the loss of each token, [N].

        Args:
            trained: Number of trained tokens in the whole update.
        """
        values_N = self._values(micro)
        if micro.idle:
            loss_N = values_N * 0
        else:
            assert step.values_S is not None and step.returns_S is not None, "a critic computed them"
            clip, device = self._algorithm.value_clip, self._policy.device
            old_N = torch.from_numpy(step.values_S[micro.where_N]).to(device)
            returns_N = torch.from_numpy(step.returns_S[micro.where_N]).to(device)
            loss_N = value_loss(values_N, old_N, returns_N, clip)
            clipped_N = (values_N - old_N).abs() > (clip or math.inf)
            for name, number in (("critic/loss", loss_N.sum()), ("critic/clip_share", clipped_N.sum())):
                done.sums[name] += number.item()
        (loss_N.sum() / max(1, trained)).backward()
        self.optimizer.gather()
        return loss_N.detach()

    def _values(self, micro: MicroBatch, before: int = 1) -> Tensor:
        """Return the value of the state that ends `before` tokens before each trained token."""
        return self.model(micro.input_ids_BT, micro.rows_N, micro.columns_N - before, micro.packed)

    def _own(self, training: Training) -> Training:
        """Return the training section with the critic's learning rate."""
        return training.model_copy(update={"lr": self._algorithm.critic_lr or training.lr})


def value_metrics(values_N: np.ndarray, returns_N: np.ndarray) -> dict[str, float]:
    """Return metrics of a step's trained tokens, before its updates.

    critic/explained_variance is 1 - variance(return - value) / variance(return): 1 for a perfect critic, 0 for one that
    only knows the mean. It is left out when all returns are equal.
    """
    if not len(values_N):
        return {}
    means = {
        "critic/value": float(values_N.mean(dtype=np.float64)),
        "critic/return": float(returns_N.mean(dtype=np.float64)),
    }
    variance = float(returns_N.var(dtype=np.float64))
    if not variance:
        return means
    return means | {"critic/explained_variance": 1 - float((returns_N - values_N).var(dtype=np.float64)) / variance}


def _check_same_tokens(model: Any, path: str, tokenizer: Any, vocabulary: int) -> None:
    """Raise ModelError when a token ID means something else to the critic than to the policy, or nothing."""
    embedded = model.get_input_embeddings().weight.shape[0]
    try:
        critics = load_tokenizer(path).get_vocab()
    except ModelError:  # the critic has no tokenizer: only the sizes can be compared
        critics = tokenizer.get_vocab() if embedded == vocabulary else {}
    used = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number < vocabulary)
    differing = [(number, token) for number, token in used if critics.get(token) != number]
    differing = differing or [(number, token) for number, token in used if number >= embedded]
    if not differing:
        return
    number, token = differing[0]
    raise ModelError(
        f"the critic in {path} has another vocabulary than the policy: {embedded} embeddings and the policy's "
        f"{vocabulary}; {token!r} is token {number} of the policy and {critics.get(token, 'none')} of the "
        f"critic. Use a critic of the policy's family, or unset algorithm.critic."
    )
