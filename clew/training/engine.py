"""The training engine: it takes a batch and makes one step of the policy, with everything that the record keeps of it.

::

    batch ──► plan ──► reference ──► advantages ──► logprobs at the start (proximal) ──► for each mini-batch:
                                                                                           for each micro-batch:
                                                                                             score, loss, backward
                                                                                           clip, AdamW, round
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceABC
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from clew.algorithms import LOSSES
from clew.config import Algorithm, Config, Training
from clew.errors import ImageError, ModelError, TrainingError, first_line
from clew.models.architecture import context_in, positions_go_on, width_of
from clew.models.loading import (
    check_vocabulary,
    is_out_of_memory,
    load_model,
    load_tokenizer,
    load_value_model,
    pick_device,
)
from clew.models.vision import load_vision
from clew.record.digest import to_hex, total
from clew.record.media import Media
from clew.record.rows import Sequence
from clew.seeds import derive_seed
from clew.training.advantages import advantages_function
from clew.training.batching import Plan, deal, loss_weights, padding_share, plan_step
from clew.training.critic import Critic, ValueModel, value_metrics
from clew.training.digests import Digests, digest_tensors
from clew.training.isolation import keeps_rows_apart
from clew.training.losses import loss_function
from clew.training.metrics import gap_metrics, lag_metrics, rollout_metrics
from clew.training.optimizer import GradientError, Optimizer
from clew.training.preferences import deal_pairs, pair_losses, supervised_loss
from clew.training.ranks import ALONE, Ranks
from clew.training.scoring import Scores, score
from clew.training.sharding import slice_of, spread, state_of
from clew.training.tokens import MicroBatch, Tokens

if TYPE_CHECKING:
    from clew.training.lora import Adapters

P = ParamSpec("P")
T = TypeVar("T")

Watch = Callable[[str, dict[str, Any]], None]
"""Function that is called with the name of a step's next stage (advantages, loss, backward, update) and its values."""

TokenLoss = Callable[[MicroBatch, Scores], tuple[Tensor, dict[str, Tensor]]]
"""Function (micro-batch, its scores) -> (loss_N, sums over the N tokens by the name of a metric)."""


log = logging.getLogger("clew.training")

RECENT_NORMS = 32
"""Number of recent updates whose gradient norms define a spike."""

TOO_FAST = "Perhaps training.lr is too high."
NOT_YET = "No update was made before: the model, or the loss, is such that these tokens overflow."
ENOUGH_NORMS = 8
"""Minimum number of updates before spike detection starts."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of one step."""

    metrics: dict[str, float]
    stages: dict[str, list[np.ndarray]]
    """Arrays by name, one per sequence (of all ranks), aligned with its tokens, and 0 for untrained tokens:

    - advantages
    - proximal_logprobs
    - logprobs: current, as the loss saw them
    - reference_logprobs: with a KL term
    - values, returns: with a critic
    - entropies: with an entropy bonus
    - loss: the token's contribution to the mean over all tokens, weighted as algorithm.loss_mean asks
    """
    plan: Plan
    digests: dict[str, Any]
    """Digests of gradients, one for each update, before clipping, and of weights after the step. See
    `clew.record.digest`."""
    tensor_digests: dict[str, Any]
    """Digests of each parameter's gradients and weights, in the order of `TrainEngine.parameter_names`, as
    `clew.record.digest.to_hex` writes them."""
    timings: dict[str, float]
    """Seconds spent in advantages, logprobs, reference, critic, forward_backward, optimizer and digest."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A step before its first update. Arrays are aligned with its S tokens."""

    tokens: Tokens
    plan: Plan
    loss_of: TokenLoss
    advantages_S: np.ndarray
    behaviour_S: np.ndarray
    versions_S: np.ndarray
    proximal_S: np.ndarray | None
    """Logprobs at the start of the step; None with a single update, where the loss computes them anyway."""
    reference_S: np.ndarray | None
    values_S: np.ndarray | None
    """Values of the critic; None, like returns_S, without a critic."""
    returns_S: np.ndarray | None


@dataclass(kw_only=True)
class _Pass:
    """Results of the updates of one step."""

    logprobs_S: np.ndarray
    """Logprobs of this rank's rows, 0 elsewhere; of all rows when the updates are done."""
    entropies_S: np.ndarray
    loss_S: np.ndarray
    sums: dict[str, float] = field(default_factory=dict)
    gradients: list[Digests] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: int = 0
    lr: float = 0.0


def _within_memory(step: Callable[Concatenate[TrainEngine, P], T]) -> Callable[Concatenate[TrainEngine, P], T]:
    """Wrap a step so that it raises TrainingError, with advice, when it runs out of memory."""

    @wraps(step)
    def within(self: TrainEngine, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return step(self, *args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"step {self.version} does not fit into the memory of {self.device}: {first_line(error)} Lower "
                f"training.micro_batch_tokens ({self.config.training.micro_batch_tokens}), or set "
                f"training.activation_checkpointing=true, or spread the model over more ranks (launch.ranks)."
            ) from error

    return within


class TrainEngine:
    """The policy, its optimizer and the reference model; with several ranks, this rank's slice of them (FSDP2).

    Every rank calls the same methods in the same order, with the same batch, and gets the same results.

    The model stays in eval mode: no dropout, so that logprobs here and in inference mean the same distribution, and
    so that a step repeats bit for bit (on CPU, with the same number of ranks and threads).
    """

    def __init__(
        self,
        config: Config,
        *,
        model_path: str | None = None,
        device: torch.device | None = None,
        ranks: Ranks = ALONE,
        media: Media | None = None,
    ) -> None:
        """Load the model.

        Args:
            model_path: Other initial weights than config.model.path. The KL term always refers to config.model.path,
                and adapters are always added to it.
            device: Device of the model; None: config.model.device.
            media: Storage of the sequences' images.

        Raises:
            ModelError: The model cannot be loaded or trained.
            ConfigError: The loss or the advantages cannot be loaded.
        """
        self.config = config
        self.ranks = ranks = ranks.grouped(config.training.tp)
        self._media = media
        self._advantages, self._loss = advantages_function(config.algorithm), loss_function(config.algorithm)
        self.device = device or pick_device(config.model.device)
        wants_adapters = config.training.lora_rank is not None
        path = config.model.path if wants_adapters or model_path is None else model_path
        self.tokenizer = load_tokenizer(path)
        self.vision = load_vision(path)
        self._scores_rewards = config.training.objective == "reward_model"
        self.model = self.read(path, self._host)
        check_vocabulary(self.model, self.tokenizer, path)
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if self._scores_rewards:
            self.model.config.pad_token_id = self.tokenizer.pad_token_id  # what transformers finds the last token by
        elif self.model.get_output_embeddings() is None:
            raise ModelError(
                f"{type(self.model).__name__} in {path} has no output embedding that can be found; "
                f"expected a causal language model."
            )
        self.adapters: Adapters | None = None
        """Adapters of the model, if training.lora_rank is set."""
        if wants_adapters:
            from clew.training.lora import Adapters

            self.adapters = Adapters(self.model, config)
        self._scorer = ValueModel(self.model) if self._scores_rewards else None
        spread(self.model, config.training, ranks, self.device, root=self._scorer)
        self.version = 0
        """Number of steps done."""
        self.whole = True
        """True while the weights are those of a whole number of steps; False between a step's updates."""
        total = config.training.steps * config.algorithm.minibatches
        self.optimizer = Optimizer(self.model, config.training, total_updates=total)
        self._reference: Any = None
        """Reference model; with adapters, it is the model itself with its adapters switched off."""
        self._refer()
        self.critic: Critic | None = None
        if config.algorithm.advantages == "gae":
            self.critic = Critic(
                config,
                self.device,
                ranks,
                own=self._own,
                idle=self._idle,
                tokenizer=self.tokenizer,
                vocabulary=vocabulary,
            )
        self.packs = self._can_pack()
        """True if rows of different lengths are packed, rather than padded."""
        self.watch: Watch = _nobody
        """Function that is called at each stage of a step, for debuggers and diagnoses."""
        self.recent_norms: deque[float] = deque(maxlen=RECENT_NORMS)
        """Gradient norms of the last updates that were made, against which a spike is measured."""
        self._digests: Digests | None = None
        self._timings: dict[str, float] = {}

    def configure(self, training: Training, algorithm: Algorithm) -> None:
        """Continue with other settings of the optimizer and the algorithm. A critic cannot be added later.

        Raises:
            ModelError: algorithm.advantages=gae without a critic, or a KL term needs a reference that cannot be loaded.
        """
        self.config = self.config.model_copy(update={"training": training, "algorithm": algorithm})
        self._refer()
        if algorithm.advantages == "gae" and self.critic is None:
            raise ModelError(f"algorithm.advantages=gae needs a critic, and there is none at version {self.version}.")
        if algorithm.advantages != "gae" and self.critic is not None:
            self.critic, self._digests = None, None
        self.packs = self._can_pack()
        self._advantages, self._loss = advantages_function(algorithm), loss_function(algorithm)
        self.optimizer.configure(training, total_updates=training.steps * algorithm.minibatches)
        if self.critic is not None:
            self.critic.configure(training, algorithm)

    def _refer(self) -> None:
        """Load or drop the reference model, so that there is one only with a KL term."""
        if self.config.algorithm.kl_coef == 0 or self._scores_rewards:
            self._reference = None
        elif self.adapters is not None:
            self._reference = self.model
        elif self._reference is None:
            self._reference = self.read(self.config.model.path, self._host).requires_grad_(False)
            spread(self._reference, self.config.training, self.ranks, self.device)

    @property
    def _host(self) -> torch.device:
        """Device on which a model is loaded, before it is sharded over the ranks."""
        return self.device if self.ranks.size == 1 else torch.device("cpu")

    def _can_pack(self) -> bool:
        models = (self.model, self._reference, self.critic and self.critic.inner)
        return all(keeps_rows_apart(each) for each in models if each is not None)

    def _seed(self) -> int:
        """Return the seed for anything random in a step, such as dropout in the user's own loss.

        Ranks that compute different rows get different seeds. A replay on the same number of ranks gets the same seeds.
        """
        return derive_seed(self.config.seed, f"step {self.version} rank {self.ranks.dp_rank}")

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of a sequence; None if the model does not say."""
        return context_in(self.model.config)[0]

    def read(self, path: str, device: torch.device) -> Any:
        """Load a model of the kind that is trained here, unsharded, from a folder or the hub.

        Raises:
            ModelError: The model cannot be loaded.
        """
        if self._scores_rewards:
            return load_value_model(path, self.config.model.dtype, device, "model.path")
        return load_model(path, self.config.model.dtype, device)

    def published_state(self) -> dict[str, Tensor]:
        """Return the policy's parameters and persistent buffers for readers of weights, with adapters merged into them.

        They are on rank 0, see `clew.training.sharding.collect`.
        """
        state = state_of(self.model, self.ranks)
        return state if self.adapters is None else self.adapters.merged(state)

    # The two kinds of step -------------------------------------------------------------------------------------------

    @_within_memory
    def train_step(self, sequences: SequenceABC[Sequence]) -> StepResult:
        """Make one step of reinforcement learning: `algorithm.minibatches` updates.

        Raises:
            TrainingError: A loss or gradient is not finite; the update in question was not made.
        """
        assert sequences, "a step needs a batch"
        torch.manual_seed(self._seed())
        self._timings = dict.fromkeys(
            ("advantages", "logprobs", "reference", "critic", "forward_backward", "optimizer", "digest"), 0.0
        )
        step = self.prepare(sequences)
        tokens = step.tokens
        done = self._updates(tokens, step.plan, step.loss_of)
        proximal_S = done.logprobs_S if step.proximal_S is None else step.proximal_S
        stages = {
            "advantages": step.advantages_S,
            "proximal_logprobs": proximal_S,
            "logprobs": done.logprobs_S,
            "loss": done.loss_S,
        }
        if step.reference_S is not None:
            stages["reference_logprobs"] = step.reference_S
        if self.config.algorithm.entropy_coef:
            stages["entropies"] = done.entropies_S
        mask_S = tokens.loss_mask_S
        critic_metrics = self._fit_critic(step, done, stages)
        return self._finish(
            tokens,
            step.plan,
            done,
            stages={name: tokens.split(values_S) for name, values_S in stages.items()},
            metrics={
                **rollout_metrics(sequences),
                **lag_metrics(step.versions_S[mask_S], version=self.version),
                **gap_metrics(step.behaviour_S[mask_S], proximal_S[mask_S]),
                **critic_metrics,
            },
        )

    def prepare(self, sequences: SequenceABC[Sequence]) -> Prepared:
        """Compute everything of a step that comes before its first update. Changes nothing."""
        algorithm = self.config.algorithm
        tokens = Tokens.of(sequences)
        self._check(tokens)
        plan = plan_step(
            tokens.lengths.tolist(),
            [sequence.group_id for sequence in sequences],
            minibatches=algorithm.minibatches,
            **self._dealing(tokens),
        )
        with self._timed("reference"):
            reference_S = self._score_reference(tokens, plan)
        self.watch("advantages", {"batch": sequences, "tokens": tokens, "plan": plan})
        with self._timed("critic"):
            values_S = None if self.critic is None else self.critic.values(tokens, plan)
        with self._timed("advantages"):
            reference = None if reference_S is None else tokens.split(reference_S)
            values = None if values_S is None else tokens.split(values_S)
            found = self._advantages(sequences, reference, values)
            advantages_S = np.concatenate(found.advantages)
            returns_S = None if found.returns is None else np.concatenate(found.returns)
            weights = loss_weights(sequences, plan, algorithm)
            weights_S = None if weights is None else weights[tokens.row_of_S]
        with self._timed("logprobs"):
            # With a single update the logprobs at the start of the step are those that the loss computes anyway.
            proximal_S = self._score_all(self.model, tokens, plan) if len(plan) > 1 else None
        behaviour_S = np.concatenate([sequence.logprobs for sequence in sequences])

        def loss_of(micro: MicroBatch, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
            def here(values_S: np.ndarray) -> Tensor:
                return torch.from_numpy(values_S[micro.where_N]).to(self.device)

            logprobs_N = scores.logprobs_N
            inputs: dict[str, Any] = {
                "logprobs_N": logprobs_N,
                "proximal_N": logprobs_N.detach() if proximal_S is None else here(proximal_S),
                "behaviour_N": here(behaviour_S),
                "advantages_N": here(advantages_S),
                "reference_N": None if reference_S is None else here(reference_S),
                "entropies_N": scores.entropies_N if algorithm.entropy_coef else None,
                "rows_N": micro.rows_N,
            }
            self.watch("loss", {"batch": sequences, "tokens": tokens, "micro": micro, **inputs})
            loss = self._loss(**inputs)
            self.watch("backward", {"batch": sequences, "tokens": tokens, "micro": micro, "loss": loss, **inputs})
            return loss.per_token_N if weights_S is None else loss.per_token_N * here(weights_S), loss.sums

        return Prepared(
            tokens=tokens,
            plan=plan,
            loss_of=loss_of,
            advantages_S=advantages_S,
            behaviour_S=behaviour_S,
            versions_S=np.concatenate([sequence.versions for sequence in sequences]),
            proximal_S=proximal_S,
            reference_S=reference_S,
            values_S=values_S,
            returns_S=returns_S,
        )

    @_within_memory
    def supervised_step(self, tokens: Tokens) -> StepResult:
        """Make one step of one update on demonstrations or pairs, as training.objective says.

        The loss is the mean cross-entropy of the tokens in the loss mask, or the mean loss of the pairs. Rows 2k and 2k
        + 1 are a pair: the chosen and the rejected.

        Raises:
            TrainingError: As for `train_step`.
        """
        self._timings = dict.fromkeys(("reference", "forward_backward", "optimizer", "digest"), 0.0)
        lengths, objective = tokens.lengths.tolist(), self.config.training.objective
        if objective == "sft":
            plan, loss_of = [deal(lengths, range(len(lengths)), **self._dealing(tokens))], _supervised
        else:
            plan = [deal_pairs(lengths, **self._dealing(tokens))]
            with self._timed("reference"):
                reference_S = self._score_reference(tokens, plan)
            beta = self.config.algorithm.kl_coef if objective == "dpo" else None
            loss_of = pair_losses(tokens, plan, beta=beta, reference_S=reference_S)
        done = self._updates(tokens, plan, loss_of)
        stages = {"logprobs": tokens.split(done.logprobs_S), "loss": tokens.split(done.loss_S)}
        return self._finish(tokens, plan, done, stages=stages, metrics={})

    def _check(self, tokens: Tokens) -> None:
        """Raise TrainingError for sequences that are too long, or have unknown tokens, for the policy or its critic."""
        models: list[tuple[Any, str]] = [(self.model, "the model")]
        if self.critic is not None:
            models.append((self.critic.inner, "the critic"))
        for model, name in models:
            context, field = context_in(model.config)
            longest = tokens.lengths.max()
            if context is not None and longest > context and not positions_go_on(model.config):
                raise TrainingError(
                    f"{tokens.ids[tokens.lengths.argmax()]} has {longest} tokens; {name} takes {context} ({field})."
                )
            vocabulary = model.get_input_embeddings().weight.shape[0]
            strange = np.flatnonzero((tokens.input_ids_S < 0) | (tokens.input_ids_S >= vocabulary))
            if len(strange):
                at = int(strange[0])
                row = tokens.row_of_S[at]
                raise TrainingError(
                    f"token {at - tokens.starts[row]} of {tokens.ids[row]} is {tokens.input_ids_S[at]}; {name} has "
                    f"embeddings for the ids 0 to {vocabulary - 1}."
                )

    def score(self, sequences: SequenceABC[Sequence]) -> list[np.ndarray]:
        """Return the logprobs that the policy now gives the trained tokens, aligned like a stage. Changes nothing."""
        tokens = Tokens.of(sequences)
        self._check(tokens)
        plan = [deal(tokens.lengths.tolist(), range(len(sequences)), **self._dealing(tokens))]
        return tokens.split(self._score_all(self.model, tokens, plan))

    def score_micro(self, micro: MicroBatch) -> Scores:
        """Return the policy's scores of a micro-batch, with the gradients that the loss needs."""
        return self._score(self.model, micro, entropy_gradient=self.config.algorithm.entropy_coef > 0)

    def weights_digest(self) -> str:
        """Return the digest of all parameters as the model computes with them."""
        return total(self.weights_digests().values())

    def weights_digests(self) -> Digests:
        """Return the digest of each parameter, including the critic's. Untrained parameters are digested only once."""
        if self._digests is None:
            self._digests = self.frozen_digests | digest_tensors(self.trained_parameters(), self.ranks)
        return self._digests

    @cached_property
    def frozen_digests(self) -> Digests:
        """Digest of each parameter that is not trained: with adapters, those of the base model."""
        frozen = [(name, each) for name, each in self.model.named_parameters() if not each.requires_grad]
        return digest_tensors(frozen, self.ranks)

    def trained_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's trained parameters, then its critic's, whose names begin with "critic."."""
        yield from ((name, each) for name, each in self.model.named_parameters() if each.requires_grad)
        if self.critic is not None:
            yield from ((f"critic.{name}", each) for name, each in self.critic.inner.named_parameters())

    @property
    def parameter_names(self) -> list[str]:
        """Names of all parameters: those that are not trained, then the policy's trained ones, then the critic's."""
        frozen = [name for name, each in self.model.named_parameters() if not each.requires_grad]
        return [*frozen, *(name for name, _ in self.trained_parameters())]

    def restored(self, version: int, recent_norms: Iterable[float] = ()) -> None:
        """Reset the bookkeeping after weights of `version` were loaded, whose last updates had these gradient norms."""
        self.version = version
        self.recent_norms = deque(recent_norms, maxlen=RECENT_NORMS)
        self._digests = None

    # Inside a step ---------------------------------------------------------------------------------------------------

    def _packs(self, tokens: Tokens) -> bool:
        """Return whether these rows are packed. Rows with images are not, because models number their positions
        differently."""
        return self.packs and tokens.images is None

    def _dealing(self, tokens: Tokens) -> dict[str, Any]:
        """Return the arguments with which `deal` makes micro-batches of these rows for this model and these ranks."""
        budget = self.config.training.micro_batch_tokens
        return {
            "budget": budget,
            "packed": self._packs(tokens),
            "ranks": self.ranks.dp_size,
            "width": width_of(self.model),
        }

    def _updates(self, tokens: Tokens, plan: Plan, loss_of: TokenLoss) -> _Pass:
        done = _Pass(logprobs_S=self._zeros(tokens), entropies_S=self._zeros(tokens), loss_S=self._zeros(tokens))
        for minibatch in plan:
            problem: str | None = None
            with self._timed("forward_backward"):
                for micro, scores, loss_N, sums in self._backward(tokens, minibatch, loss_of):
                    done.logprobs_S[micro.where_N] = scores.logprobs_N.detach().cpu().numpy()
                    done.entropies_S[micro.where_N] = scores.entropies_N.detach().cpu().numpy()
                    done.loss_S[micro.where_N] = loss_N.detach().cpu().numpy()
                    problem = problem or self._bad_loss(tokens, micro, done)
                    for name, value in {"entropy": scores.entropies_N.detach().sum(), **sums}.items():
                        done.sums[name] = done.sums.get(name, 0.0) + float(value)
            with self._timed("digest"):
                done.gradients.append(digest_tensors(self.optimizer.gradients().items(), self.ranks))
            with self._timed("optimizer"):
                done.lr = self.optimizer.lr
                done.norms.append(self.optimizer.clip())
                problem = next(filter(None, self.ranks.gather(problem)), None) or self.bad_norm(done.norms[-1])
                if problem is not None:
                    self._refuse(problem, done)
                    continue
                self.recent_norms.append(done.norms[-1])
                self.watch("update", {"tokens": tokens, "gradients": self.optimizer.gradients()})
                self.whole = False
                self.optimizer.update()
        self._digests = None
        for name in ("logprobs_S", "entropies_S", "loss_S"):
            setattr(done, name, self.ranks.add_up_shares(getattr(done, name)))
        done.sums = self.ranks.add_up_named(done.sums)
        return done

    def _backward(
        self, tokens: Tokens, minibatch: list[list[int]], loss_of: TokenLoss
    ) -> Iterator[tuple[MicroBatch, Scores, Tensor, dict[str, Tensor]]]:
        """Accumulate this rank's part of the gradient of the mean loss over all trained tokens of a mini-batch.

        Yields:
            Each micro-batch of this rank with its scores, loss and sums.
        """
        trained = sum(tokens.trained_in(rows) for rows in minibatch)
        for micro in self._own(tokens, minibatch):
            if micro is None:
                (self._score(self.model, self._idle).logprobs_N.sum() * 0).backward()
                self.optimizer.gather()
                continue
            scores = self.score_micro(micro)
            loss_N, sums = loss_of(micro, scores)
            (loss_N.sum() / trained).backward()
            self.optimizer.gather()
            yield micro, scores, loss_N, sums

    def _score_reference(self, tokens: Tokens, plan: Plan) -> np.ndarray | None:
        """Return the logprobs [S] of the reference model; None if nothing refers to it."""
        if self._reference is None:
            return None
        with nullcontext() if self.adapters is None else self.adapters.off():
            return self._score_all(self._reference, tokens, plan)

    @torch.no_grad()
    def _score_all(self, model: Any, tokens: Tokens, plan: Plan) -> np.ndarray:
        """Return the logprobs [S] of the trained tokens.

        They are computed in exactly the micro-batches of the loss, so that the same weights give the same bits.
        """
        logprobs_S = self._zeros(tokens)
        for minibatch in plan:
            for micro in self._own(tokens, minibatch):
                scores = self._score(model, micro or self._idle)
                if micro is not None:
                    logprobs_S[micro.where_N] = scores.logprobs_N.cpu().numpy()
        return self.ranks.add_up_shares(logprobs_S)

    def _own(self, tokens: Tokens, minibatch: list[list[int]]) -> Iterator[MicroBatch | None]:
        """Yield this rank's micro-batches.

        None stands for a micro-batch in which only other ranks have something to compute. This rank must compute
        something all the same, since all ranks gather parameters together.
        """
        for rows in minibatch[self.ranks.dp_rank :: self.ranks.dp_size]:
            if tokens.trained_in(rows):
                yield self.micro_batch(tokens, rows)
            elif self.ranks.dp_size > 1:
                yield None

    def micro_batch(self, tokens: Tokens, rows: list[int]) -> MicroBatch:
        """Return these rows in the form that the model takes.

        Raises:
            TrainingError: The images do not fit the model, or there is no record with images.
            RecordError: An image cannot be read.
        """
        micro = MicroBatch.of(tokens, rows, self.device, pack=self._packs(tokens))
        if tokens.images is None and self.vision is None:
            return micro
        return replace(micro, seen=self._seen(tokens, rows, micro.input_ids_BT))

    def _seen(self, tokens: Tokens, rows: list[int], input_ids_BT: Tensor) -> dict[str, Tensor]:
        """Return the model's inputs for the images of these rows.

        Raises:
            TrainingError: The images do not fit the model, or there is no record with images.
            RecordError: An image cannot be read.
        """
        images = [[self._read_image(name) for name in tokens.images[row]] if tokens.images else [] for row in rows]
        if self.vision is None:
            raise TrainingError(f"{tokens.ids[rows[0]]} shows images, and this model takes none.")
        for row, shown in zip(rows, images, strict=True):
            try:
                self.vision.check(tokens.input_ids_S[tokens.starts[row] : tokens.starts[row + 1]].tolist(), shown)
            except ImageError as error:
                raise TrainingError(f"{tokens.ids[row]}: {error} Was it made with another model's processor?") from None
        return self.vision.inputs(input_ids_BT, images, self.model.dtype)

    def _read_image(self, name: str) -> bytes:
        if self._media is None:
            raise TrainingError(f"image {name} is to be read, and there is no record here that could have it.")
        return self._media.read(name)

    @cached_property
    def _idle(self) -> MicroBatch:
        """Placeholder micro-batch of two meaningless tokens."""
        nothing = Tokens(
            ids=["idle"],
            starts=np.array([0, 2]),
            input_ids_S=np.zeros(2, np.int32),
            loss_mask_S=np.array([False, True]),
            temperatures_S=np.ones(2, np.float32),
        )
        return MicroBatch.of(nothing, [0], self.device)

    def _zeros(self, tokens: Tokens) -> np.ndarray:
        """Return zeros [S] for what the model computes: float32, or as wide as the model."""
        return np.zeros(tokens.starts[-1], np.float64 if self.model.dtype == torch.float64 else np.float32)

    def _score(self, model: Any, micro: MicroBatch, *, entropy_gradient: bool = False) -> Scores:
        if self._scorer is not None:
            scores_N = self._scorer(micro.input_ids_BT, micro.rows_N, micro.columns_N, micro.packed)
            return Scores(logprobs_N=scores_N, entropies_N=torch.zeros_like(scores_N))
        return score(
            model,
            micro.input_ids_BT,
            micro.rows_N,
            micro.columns_N,
            micro.temperatures_N,
            micro.packed,
            seen=micro.seen,
            entropy_gradient=entropy_gradient,
        )

    def _fit_critic(self, step: Prepared, done: _Pass, stages: dict[str, np.ndarray]) -> dict[str, float]:
        """Train the critic, if there is one, on the step's returns.

        Its stages are added to `stages`, and its gradients to `done`.

        Returns:
            The critic's metrics; empty without a critic.
        """
        if self.critic is None or step.values_S is None or step.returns_S is None:
            return {}
        stages |= {"values": step.values_S, "returns": step.returns_S}
        with self._timed("critic"):
            self.whole = False
            fitted = self.critic.fit(step.tokens, step.plan, step.values_S, step.returns_S, step=self.version)
        self._digests = None
        for gradients, critics in zip(done.gradients, fitted.gradients, strict=True):
            gradients |= _of_critic(critics)
        mask_S = step.tokens.loss_mask_S
        return {
            **{name: value / max(1, int(mask_S.sum())) for name, value in fitted.sums.items()},
            "critic/grad_norm": float(np.mean(fitted.norms)),
            "critic/updates_skipped": float(fitted.skipped),
            **value_metrics(step.values_S[mask_S], step.returns_S[mask_S]),
        }

    def _finish(
        self, tokens: Tokens, plan: Plan, done: _Pass, *, stages: dict[str, list[np.ndarray]], metrics: dict[str, float]
    ) -> StepResult:
        with self._timed("digest"):
            digests = {"gradients": [total(each.values()) for each in done.gradients], "weights": self.weights_digest()}
            tensor_digests = {
                "gradients": [to_hex(each.get(name, 0) for name in self.parameter_names) for each in done.gradients],
                "weights": to_hex(self.weights_digests().values()),
            }
        self._check_weights()
        self.version += 1
        self.whole = True
        trained = int(tokens.loss_mask_S.sum())
        metrics |= {
            "loss": float(done.loss_S.sum(dtype=np.float64)) / max(1, trained),
            **{name: value / max(1, trained) for name, value in done.sums.items()},
            "grad_norm": float(np.mean(done.norms)),
            "updates_skipped": float(done.skipped),
            "lr": done.lr,
            "tokens": float(len(tokens.input_ids_S)),
            "tokens_trained": float(trained),
            "padding_share": padding_share(tokens.lengths.tolist(), plan, packed=self._packs(tokens)),
        }
        return StepResult(
            metrics=metrics,
            stages=stages,
            plan=plan,
            digests=digests,
            tensor_digests=tensor_digests,
            timings=self._timings,
        )

    def _bad_loss(self, tokens: Tokens, micro: MicroBatch, done: _Pass) -> str | None:
        """Return what is wrong with the losses of a micro-batch; None if they are finite."""
        bad = ~np.isfinite(done.loss_S[micro.where_N])
        if not bad.any():
            return None
        where = int(micro.where_N[bad][0])
        row, logprob = int(tokens.row_of_S[where]), done.logprobs_S[where]
        if (loss := self.config.algorithm.loss) not in LOSSES:
            cause = f"It is what algorithm.loss={loss} returned."
        elif math.isfinite(logprob):
            cause = "So it is its advantage, its behaviour logprob or a coefficient of the loss that is not finite."
        else:
            cause = self._advice
        return (
            f"the loss of token {where - tokens.starts[row]} of {tokens.ids[row]} is {done.loss_S[where]} (its logprob "
            f"is {logprob:.6g}); {int(bad.sum())} of its micro-batch's {len(bad)} are not finite. {cause}"
        )

    @property
    def _advice(self) -> str:
        """Hint shown when the model itself produced NaN or infinity."""
        return TOO_FAST if self.optimizer.updates else NOT_YET

    def bad_norm(self, norm: float) -> str | None:
        """Return why an update with a gradient of this norm is not made; None if nothing is wrong."""
        if not math.isfinite(norm):
            names = self._not_finite(self.optimizer.gradients().items())
            where = names[0] if names else "the sum"
            return (
                f"the norm of the gradient is {norm}, first in {where}, although every loss is finite. {self._advice}"
            )
        factor = self.config.training.spike_factor
        if factor is None or len(self.recent_norms) < ENOUGH_NORMS:
            return None
        median = statistics.median(self.recent_norms)
        if norm <= factor * median:
            return None
        return (
            f"the norm of the gradient is {norm:.4g}, over training.spike_factor={factor:g} times the median of the "
            f"last {len(self.recent_norms)} updates, {median:.4g}. {TOO_FAST}"
        )

    def _refuse(self, problem: str, done: _Pass) -> None:
        """Leave out an update.

        Raises:
            GradientError: training.on_bad_gradient is "stop".
        """
        self.optimizer.forget()
        said = f"step {self.version}: {problem} This update was not made."
        where = f"`clew blame RUN --step {self.version}` says where it comes from"
        if self.config.training.on_bad_gradient == "stop":
            raise GradientError(
                f"{said} {where}. With training.on_bad_gradient=skip the run goes on without such updates."
            )
        done.skipped += 1
        log.warning("%s %s.", said, where)

    def _check_weights(self) -> None:
        if names := self._not_finite(self.trained_parameters()):
            raise GradientError(
                f"step {self.version}: after the update {names[0]} is not finite, although every gradient was. The "
                f"step was not committed. training.lr is {self.config.training.lr:g}: start another trial=NAME "
                f"with a lower one, from the last checkpoint."
            )

    def _not_finite(self, named: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Return the names of the tensors that have NaN or infinity on any rank."""
        pieces = {name: slice_of(tensor.detach(), self.ranks) for name, tensor in named}
        bad = [piece is not None and not bool(piece[0].isfinite().all()) for piece in pieces.values()]
        counts = self.ranks.add_up(np.array(bad, np.int64))
        return [name for name, count in zip(pieces, counts, strict=True) if count]

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._timings[part] = self._timings.get(part, 0.0) + time.perf_counter() - started


def make_deterministic(training: Training) -> None:
    """Make CUDA's kernels give the same bits each time, if training.deterministic asks for it.

    Call this before the first CUDA kernel runs.
    """
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(training.deterministic)


def _supervised(micro: MicroBatch, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
    return supervised_loss(scores.logprobs_N), {}


def _of_critic(digests: Digests) -> Digests:
    return {f"critic.{name}": digest for name, digest in digests.items()}


def _nobody(stage: str, scope: dict[str, Any]) -> None: ...
