"""The training engine: it trains the policy on a batch for one step, and returns what the record keeps of the step.

::

    batch ──► plan ──► reference ──► advantages ──► logprobs at the start (proximal) ──► for each mini-batch:
                                                                                           for each micro-batch:
                                                                                             score, loss, backward
                                                                                           clip, AdamW, round
                                                                                 ──► critic, if there is one
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceABC
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from clew.algorithms.losses import PolicyLoss, TrainedTokens
from clew.algorithms.rejection import rejects
from clew.config import Algorithm, Config, Training, check_critic_fields
from clew.errors import ModelError, TrainingError, first_line
from clew.models.loading import is_out_of_memory
from clew.record.array_digest import total
from clew.record.batch_digest import to_hex
from clew.record.media import Media
from clew.record.rows import Sequence
from clew.seeds import derive_seed
from clew.training.advantages import advantages_function, truncated
from clew.training.batch_metrics import (
    correlation_metrics,
    gap_metrics,
    lag_metrics,
    rejection_metrics,
    rollout_metrics,
)
from clew.training.batching import Plan, loss_weights, padding_share, plan_step
from clew.training.critic import Critic, value_metrics
from clew.training.custom import needs_critic
from clew.training.gradient_checks import RECENT_NORMS, hint_of, loss_problem, norm_problem, not_finite
from clew.training.loss_function import loss_function
from clew.training.optimizer import GradientError, Optimizer
from clew.training.policy import Policy, check_tokens
from clew.training.preferences import deal_pairs, pair_losses, sft_loss
from clew.training.ranks import ALONE, Ranks
from clew.training.results import OnStage, Prepared, StepResult, TokenLoss, Updates
from clew.training.scoring import Scores
from clew.training.sharded_digest import Digests, digest_tensors
from clew.training.tokens import MicroBatch, Tokens

log = logging.getLogger("clew.training")


@dataclass(kw_only=True)
class _PolicyUpdates(Updates):
    """Results of the updates of the policy in one step."""

    computed: dict[str, np.ndarray]
    """The stages logprobs, entropies, loss and rejected, [S]: of this rank's rows, and 0 elsewhere, until `add_up`."""
    lr: float = 0.0

    def add(self, micro: MicroBatch, scores: Scores, loss: PolicyLoss) -> None:
        values = {"logprobs": scores.logprobs_N, "entropies": scores.entropies_N, "loss": loss.per_token_N}
        if loss.rejected_N is not None:
            values["rejected"] = loss.rejected_N
        for name, values_N in values.items():
            self.computed[name][micro.where_N] = values_N.detach().cpu().numpy()
        for name, value in {"entropy": scores.entropies_N.detach().sum(), **loss.sums}.items():
            self.sums[name] += float(value)

    def add_up(self, ranks: Ranks) -> None:
        """Add the results of the other ranks' rows. Every rank calls this at once."""
        self.computed = {name: ranks.add_up_shares(values_S) for name, values_S in self.computed.items()}
        self.sums.update(ranks.add_up_named(self.sums))

    def stages(self, step: Prepared, algorithm: Algorithm) -> dict[str, np.ndarray]:
        """Return what the record keeps of the step's tokens, by the names in `StepResult.stages`."""
        computed = self.computed
        stages = {
            "advantages": step.advantages_S,
            "proximal_logprobs": computed["logprobs"] if step.proximal_S is None else step.proximal_S,
            "logprobs": computed["logprobs"],
            "loss": computed["loss"],
            "reference_logprobs": step.reference_S,
            "entropies": computed["entropies"] if algorithm.entropy_coef else None,
            "rejected": computed["rejected"] if rejects(algorithm) else None,
            "values": step.values_S,
            "returns": step.returns_S,
            "bootstrap_values": step.bootstrap_S,
        }
        return {name: values_S for name, values_S in stages.items() if values_S is not None}


class TrainEngine:
    """The policy, its optimizer and its critic; `train_step` trains them for one step.

    Every rank calls the same methods in the same order, with the same batch, and gets the same results.
    """

    def __init__(
        self,
        config: Config,
        *,
        model_path: str | None = None,
        ranks: Ranks = ALONE,
        media: Media | None = None,
        supervised: bool = False,
    ) -> None:
        """Load the policy, and the reference model and the critic if the algorithm needs them.

        `model_path`, `ranks` and `media` are those of `Policy`.

        Args:
            supervised: True if `train_step` trains on demonstrations or preferences, as training.objective says.

        Raises:
            ModelError: A model cannot be loaded or trained.
            ConfigError: The loss or the advantages cannot be loaded, or the critic's fields do not fit them.
        """
        check_critic_fields(config, with_critic=needs_critic(config.algorithm))
        self.config = config
        self._advantages, self._loss = advantages_function(config.algorithm), loss_function(config.algorithm)
        self.policy = Policy(config, model_path=model_path, ranks=ranks, media=media)
        self.ranks = self.policy.ranks
        self.version = 0
        """Number of steps done."""
        self.between_steps = True
        """True while the weights are those of a whole number of steps; False from a step's first update to its end."""
        self.drifted = False
        """True if recorded steps were trained again within a tolerance, so the digests of the weights may differ."""
        self.supervised = supervised
        self.optimizer = Optimizer(self.policy.model, config.training, total_updates=self._total_updates)
        self.policy.load_reference(self._has_reference)
        self.critic = Critic(config, self.policy) if needs_critic(config.algorithm) else None
        self.policy.pack_if_possible(self.critic and self.critic.inner)
        self.watch: OnStage = lambda stage, scope: None
        """Function that is called at each stage of a step, for debuggers and diagnoses."""
        self.recent_norms: deque[float] = deque(maxlen=RECENT_NORMS)
        """Gradient norms of the last updates that were made, against which a spike is measured."""
        self._digests: Digests | None = None
        self._timings: dict[str, float] = {}

    def configure(self, training: Training, algorithm: Algorithm) -> None:
        """Continue with other settings of the optimizer and the algorithm.

        A critic that is no longer needed is dropped; none can be added.

        Raises:
            ModelError: algorithm.advantages needs a critic, and the engine has none. Then nothing has changed.
        """
        with_critic = needs_critic(algorithm)
        if with_critic and self.critic is None:
            raise ModelError(
                f"Cannot continue version {self.version} with algorithm.advantages={algorithm.advantages}: it needs a "
                f"critic, and this run has none. Set algorithm.advantages back, or start another trial=NAME."
            )
        self.config = self.policy.config = self.config.model_copy(update={"training": training, "algorithm": algorithm})
        self.policy.load_reference(self._has_reference)
        if not with_critic and self.critic is not None:
            self.critic, self._digests = None, None
        self.policy.pack_if_possible(self.critic and self.critic.inner)
        self._advantages, self._loss = advantages_function(algorithm), loss_function(algorithm)
        self.optimizer.configure(training, total_updates=self._total_updates)
        if self.critic is not None:
            self.critic.configure(training, algorithm)

    @property
    def _has_reference(self) -> bool:
        """True if the policy is compared with a reference model; with demonstrations it is not."""
        demonstrations = self.supervised and self.config.training.objective == "sft"
        return self.config.algorithm.kl_coef != 0 and not demonstrations

    @property
    def _total_updates(self) -> int:
        """Number of updates of the whole run, by which the learning rate is scheduled."""
        return self.config.training.steps * (1 if self.supervised else self.config.algorithm.minibatches)

    def restored(self, version: int, recent_norms: Iterable[float] = ()) -> None:
        """Reset the bookkeeping after weights of `version` were loaded; `recent_norms` are of the updates before it."""
        self.version = version
        self.recent_norms = deque(recent_norms, maxlen=RECENT_NORMS)
        self._digests = None

    # Parameters and their digests -----------------------------------------------------------------------------------

    def trained_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's trained parameters, then its critic's, whose names begin with "critic."."""
        yield from self.policy.parameters(trained=True)
        if self.critic is not None:
            yield from ((f"critic.{name}", tensor) for name, tensor in self.critic.inner.named_parameters())

    @property
    def parameter_names(self) -> list[str]:
        """Names of all parameters: those that are not trained, then the policy's trained ones, then the critic's."""
        frozen = [name for name, _ in self.policy.parameters(trained=False)]
        return [*frozen, *(name for name, _ in self.trained_parameters())]

    def weights_digest(self) -> str:
        """Return the digest of all parameters as the model computes with them."""
        return total(self.weights_digests().values())

    def weights_digests(self) -> Digests:
        """Return the digest of each parameter, including the critic's. Every rank calls this at once."""
        if self._digests is None:
            self._digests = self.frozen_digests | digest_tensors(self.trained_parameters(), self.ranks)
        return self._digests

    @cached_property
    def frozen_digests(self) -> Digests:
        """Digest of each parameter that is not trained: with adapters, those of the base model."""
        return digest_tensors(self.policy.parameters(trained=False), self.ranks)

    # The two kinds of step -------------------------------------------------------------------------------------------

    def train_step(self, sequences: SequenceABC[Sequence]) -> StepResult:
        """Make one step: `algorithm.minibatches` updates of reinforcement learning, or one if `supervised`.

        Raises:
            TrainingError: The rows do not fit the model or memory, an update was refused, or a weight is not finite.
        """
        assert sequences, "a step needs a batch"
        try:
            return self._supervised_step(sequences) if self.supervised else self._policy_step(sequences)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"step {self.version} does not fit into the memory of {self.policy.device}: {first_line(error)} Lower "
                f"training.micro_batch_tokens ({self.config.training.micro_batch_tokens}), or set "
                f"training.activation_checkpointing=true, or spread the model over more ranks (launch.ranks)."
            ) from error

    def _policy_step(self, sequences: SequenceABC[Sequence]) -> StepResult:
        # For anything random, such as dropout in the user's own loss. Ranks with different rows get different seeds.
        torch.manual_seed(derive_seed(self.config.seed, f"step {self.version} rank {self.ranks.dp_rank}"))
        self._timings = dict.fromkeys(
            ("advantages", "logprobs", "reference", "critic", "forward_backward", "optimizer", "digest"), 0.0
        )
        step, algorithm = self.prepare(sequences), self.config.algorithm
        tokens, mask_S = step.tokens, step.tokens.loss_mask_S
        done = self._updates(tokens, step.plan, partial(self.policy_loss, step))
        stages = done.stages(step, algorithm)
        lag_N = self.version - np.concatenate([sequence.versions for sequence in sequences])[mask_S]
        metrics = {
            **rollout_metrics(sequences),
            **correlation_metrics(sequences, tokens.split(step.advantages_S), algorithm.advantages),
            **lag_metrics(lag_N),
            **gap_metrics(step.behaviour_S[mask_S], stages["proximal_logprobs"][mask_S], lag_N),
        }
        if rejects(algorithm):
            metrics |= rejection_metrics(stages["rejected"][mask_S], tokens.row_of_S[mask_S])
        metrics |= self._fit_critic(step, done)
        result = self._finish(tokens, step.plan, done, stages)
        return replace(result, metrics=metrics | result.metrics)

    def prepare(self, sequences: SequenceABC[Sequence]) -> Prepared:
        """Compute everything that a step needs before its first update. The engine is not changed."""
        algorithm = self.config.algorithm
        tokens = Tokens.of(sequences)
        check_tokens(tokens, self.policy.model, "the model")
        if self.critic is not None:
            check_tokens(tokens, self.critic.inner, "the critic")
            if shown := next((sequence.id for sequence in sequences if sequence.images), ""):
                raise TrainingError(
                    f"Cannot train on {shown}: it shows images, which critics do not take. Choose an algorithm "
                    f"without a critic."
                )
        plan = plan_step(
            tokens.lengths.tolist(),
            [sequence.group_id for sequence in sequences],
            minibatches=algorithm.minibatches,
            **self.policy.deal_arguments(tokens),
        )
        with self._timed("reference"):
            reference_S = self.policy.score_reference(tokens, plan)
        self.watch("advantages", {"batch": sequences, "tokens": tokens, "plan": plan})
        with self._timed("critic"):
            values_S = None if self.critic is None else self.critic.values(tokens, plan)
            bootstrap_S = None
            if self.critic is not None and algorithm.bootstrap_truncated:
                bootstrap_S = self.critic.after_last(tokens, plan, truncated(sequences))
        with self._timed("advantages"):
            inputs_S = (reference_S, values_S, bootstrap_S)
            found = self._advantages(sequences, *(None if each is None else tokens.split(each) for each in inputs_S))
            advantages_S = np.concatenate(found.advantages)
            returns_S = None if found.returns is None else np.concatenate(found.returns)
            weights = loss_weights(sequences, plan, algorithm)
        with self._timed("logprobs"):
            # With a single update the logprobs at the start of the step are those that the loss computes anyway.
            proximal_S = self.policy.score_all(tokens, plan) if len(plan) > 1 else None
        return Prepared(
            batch=sequences,
            tokens=tokens,
            plan=plan,
            advantages_S=advantages_S,
            weights_S=None if weights is None else weights[tokens.row_of_S],
            behaviour_S=np.concatenate([sequence.logprobs for sequence in sequences]),
            proximal_S=proximal_S,
            reference_S=reference_S,
            values_S=values_S,
            bootstrap_S=bootstrap_S,
            returns_S=returns_S,
        )

    def policy_loss(self, step: Prepared, micro: MicroBatch, scores: Scores) -> PolicyLoss:
        """Return the loss of a micro-batch of a step, weighted as algorithm.loss_mean asks."""

        def here(values_S: np.ndarray) -> Tensor:
            return torch.from_numpy(values_S[micro.where_N]).to(self.policy.device)

        trained = TrainedTokens(
            logprobs_N=scores.logprobs_N,
            proximal_N=scores.logprobs_N.detach() if step.proximal_S is None else here(step.proximal_S),
            behaviour_N=here(step.behaviour_S),
            advantages_N=here(step.advantages_S),
            reference_N=None if step.reference_S is None else here(step.reference_S),
            entropies_N=scores.entropies_N if self.config.algorithm.entropy_coef else None,
            rows_N=micro.rows_N,
        )
        scope = {"batch": step.batch, "tokens": step.tokens, "micro": micro, **vars(trained)}
        self.watch("loss", scope)
        loss = self._loss(trained)
        self.watch("backward", {**scope, "loss": loss})
        return loss if step.weights_S is None else replace(loss, per_token_N=loss.per_token_N * here(step.weights_S))

    def _supervised_step(self, sequences: SequenceABC[Sequence]) -> StepResult:
        """Make one step of one update on demonstrations or pairs, as training.objective says.

        The loss is the mean cross-entropy of the tokens in the loss mask, or the mean loss of the pairs. A pair is two
        neighbouring rows: the chosen one (2k), then the rejected one (2k + 1).
        """
        self._timings = dict.fromkeys(("reference", "forward_backward", "optimizer", "digest"), 0.0)
        tokens = Tokens.of(sequences)
        objective = self.config.training.objective
        if objective == "sft":
            plan, loss_of = self.policy.plan(tokens), sft_loss
        else:
            plan = [deal_pairs(tokens.lengths.tolist(), **self.policy.deal_arguments(tokens))]
            with self._timed("reference"):
                reference_S = self.policy.score_reference(tokens, plan)
            beta = self.config.algorithm.kl_coef if objective == "dpo" else None
            loss_of = pair_losses(tokens, plan, beta=beta, reference_S=reference_S)
        done = self._updates(tokens, plan, loss_of)
        return self._finish(tokens, plan, done, {name: done.computed[name] for name in ("logprobs", "loss")})

    def held_out_loss(self, tokens: Tokens) -> float:
        """Return the mean cross-entropy of the tokens in the loss mask, in nats. Every rank calls this at once."""
        logprobs_S = self.policy.score_all(tokens, self.policy.plan(tokens))
        return -float(logprobs_S[tokens.loss_mask_S].mean(dtype=np.float64))

    # Inside a step ---------------------------------------------------------------------------------------------------

    def _updates(self, tokens: Tokens, plan: Plan, loss_of: TokenLoss) -> _PolicyUpdates:
        """Make one update per mini-batch, unless it is refused. Return the results of all ranks' rows."""
        names = ("logprobs", "entropies", "loss", "rejected")
        done = _PolicyUpdates(computed={name: self.policy.zeros(tokens) for name in names})
        for minibatch in plan:
            problem: str | None = None
            with self._timed("forward_backward"):
                for micro, scores, loss in self._backward(tokens, minibatch, loss_of):
                    done.add(micro, scores, loss)
                    problem = problem or loss_problem(
                        tokens,
                        micro.where_N,
                        loss_S=done.computed["loss"],
                        logprobs_S=done.computed["logprobs"],
                        loss=self.config.algorithm.loss,
                        hint=hint_of(self.optimizer),
                    )
            with self._timed("digest"):
                done.gradients.append(digest_tensors(self.optimizer.gradients().items(), self.ranks))
            with self._timed("optimizer"):
                done.lr = self.optimizer.lr
                done.norms.append(self.optimizer.clip())
                # A bad loss on one rank stops the update on all of them, and so does a bad norm, which all ranks share.
                problem = next(filter(None, self.ranks.gather(problem)), None) or self.norm_problem(done.norms[-1])
                if problem is not None:
                    self._refuse(problem, done)
                    continue
                self.recent_norms.append(done.norms[-1])
                self.watch("update", {"tokens": tokens, "gradients": self.optimizer.gradients()})
                self.between_steps = False
                self.optimizer.update()
        self._digests = None
        done.add_up(self.ranks)
        return done

    def _backward(
        self, tokens: Tokens, minibatch: list[list[int]], loss_of: TokenLoss
    ) -> Iterator[tuple[MicroBatch, Scores, PolicyLoss]]:
        """Accumulate this rank's part of the gradient of the mean loss over all trained tokens of a mini-batch.

        Yields:
            Each of this rank's micro-batches that has rows to train on, with its scores and loss.
        """
        trained = sum(tokens.trained_in(rows) for rows in minibatch)
        for micro in self.policy.own_micro_batches(tokens, minibatch):
            if micro.idle:  # gathers the parameters with the other ranks, and adds 0 to the gradient
                (self.policy.score_micro(micro).logprobs_N.sum() * 0).backward()
                self.optimizer.gather()
                continue
            scores = self.score_micro(micro)
            loss = loss_of(micro, scores)
            (loss.per_token_N.sum() / trained).backward()
            self.optimizer.gather()
            yield micro, scores, loss

    def score_micro(self, micro: MicroBatch) -> Scores:
        """Return the policy's scores of a micro-batch, with the gradients that the loss needs."""
        return self.policy.score_micro(micro, entropy_gradient=self.config.algorithm.entropy_coef > 0)

    def norm_problem(self, norm: float) -> str | None:
        """Return why an update with a gradient of this norm is not made; None if nothing is wrong."""
        factor = self.config.training.spike_factor
        return norm_problem(norm, self.optimizer, self.recent_norms, factor, self.ranks)

    def _refuse(self, problem: str, done: _PolicyUpdates) -> None:
        """Drop the gradient of an update because of `problem`, and count the update as skipped.

        Raises:
            GradientError: training.on_bad_gradient is "stop".
        """
        self.optimizer.forget()
        refused = f"step {self.version}: {problem} This update was not made."
        blame = f"`clew blame RUN --step {self.version}` finds the cause"
        where = f"Its rows are in steps/step-{self.version:06d}.parquet" if self.supervised else blame
        if self.config.training.on_bad_gradient == "stop":
            raise GradientError(
                f"{refused} {where}. With training.on_bad_gradient=skip the run goes on without such updates."
            )
        done.skipped += 1
        log.warning("%s %s.", refused, where)

    def _fit_critic(self, step: Prepared, done: _PolicyUpdates) -> dict[str, float]:
        """Train the critic, if there is one, on the step's returns, and return its metrics.

        The digests of its gradients are added to `done`.
        """
        if self.critic is None or step.values_S is None or step.returns_S is None:
            return {}
        with self._timed("critic"):
            self.between_steps = False
            fitted = self.critic.fit(step, self.version)
        self._digests = None
        for gradients, critics in zip(done.gradients, fitted.gradients, strict=True):
            gradients |= {f"critic.{name}": digest for name, digest in critics.items()}
        mask_S = step.tokens.loss_mask_S
        return {
            **{name: value / max(1, int(mask_S.sum())) for name, value in fitted.sums.items()},
            "critic/grad_norm": float(np.mean(fitted.norms)),
            "critic/updates_skipped": float(fitted.skipped),
            **value_metrics(step.values_S[mask_S], step.returns_S[mask_S]),
        }

    def _finish(self, tokens: Tokens, plan: Plan, done: _PolicyUpdates, stages: dict[str, np.ndarray]) -> StepResult:
        """Check and digest the weights that the updates left, count the step as done, and return its results."""
        with self._timed("digest"):
            digests = {"gradients": [total(each.values()) for each in done.gradients], "weights": self.weights_digest()}
            tensor_digests = {
                "gradients": [to_hex(each.get(name, 0) for name in self.parameter_names) for each in done.gradients],
                "weights": to_hex(self.weights_digests().values()),
            }
        if names := not_finite(self.trained_parameters(), self.ranks):
            if done.skipped == len(plan) and not names[0].startswith("critic."):
                raise GradientError(
                    f"step {self.version}: {names[0]} had NaN or infinity before this step already. Start another "
                    f"trial=NAME from an earlier checkpoint, or with another model.path."
                )
            rate = "algorithm.critic_lr" if names[0].startswith("critic.") else "training.lr"
            raise GradientError(
                f"step {self.version}: after the update, {names[0]} has NaN or infinity, although all gradients were "
                f"finite. The step was not committed. Start another trial=NAME from the last checkpoint, with a lower "
                f"{rate}."
            )
        self.version += 1
        self.between_steps = True
        trained = int(tokens.loss_mask_S.sum())
        metrics = {
            "loss": float(stages["loss"].sum(dtype=np.float64)) / max(1, trained),
            **{name: value / max(1, trained) for name, value in done.sums.items()},
            "grad_norm": float(np.mean(done.norms)),
            "updates_skipped": float(done.skipped),
            "lr": done.lr,
            "tokens": float(len(tokens.input_ids_S)),
            "tokens_trained": float(trained),
            "padding_share": padding_share(tokens.lengths.tolist(), plan, packed=self.policy.packs_rows(tokens)),
        }
        return StepResult(
            metrics=metrics,
            stages={name: tokens.split(values_S) for name, values_S in stages.items()},
            plan=plan,
            digests=digests,
            tensor_digests=tensor_digests,
            timings=self._timings,
        )

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self.policy.device.type == "cuda":  # kernels still run after a call has returned
            torch.cuda.synchronize(self.policy.device)
        self._timings[part] = self._timings.get(part, 0.0) + time.perf_counter() - started


def make_deterministic(training: Training) -> None:
    """Make CUDA's kernels give the same bits each time, if training.deterministic asks for it.

    Call this before the first CUDA kernel runs.
    """
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(training.deterministic)
