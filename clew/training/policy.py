"""The policy: the model that is trained, and all that computes with it. It knows nothing of reinforcement learning.

::

    load ──► shard over the ranks ──► score rows of tokens ──► publish the weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from clew.config import Config
from clew.errors import ImageError, ModelError, TrainingError
from clew.models.architecture import context_in, positions_go_on, width_of
from clew.models.loading import check_vocabulary, load_model, load_tokenizer, load_value_model, pick_device
from clew.models.vision import load_vision
from clew.record.media import Media
from clew.training.batching import Plan, deal
from clew.training.isolation import keeps_rows_apart
from clew.training.ranks import Ranks
from clew.training.scoring import Scores, ValueModel, score
from clew.training.sharding import prepare_for_training, state_of
from clew.training.tokens import MicroBatch, Tokens

if TYPE_CHECKING:
    from clew.training.lora import Adapters


class Policy:
    """The model that is trained and its reference model; with several ranks, this rank's slices of them (FSDP2).

    Every rank calls the same methods in the same order, with the same rows, and gets the same results.

    The model stays in eval mode: no dropout, so that logprobs here and in inference come from the same distribution,
    and so that a step repeats bit for bit (with the same number of ranks and threads, on the CPU or with
    training.deterministic on CUDA).
    """

    def __init__(self, config: Config, *, model_path: str | None, ranks: Ranks, media: Media | None) -> None:
        """Load the model.

        Args:
            config: The sections model and training are used, and the seed for adapters.
            model_path: Initial weights; None: config.model.path, which the reference always has. Ignored with adapters:
                they are added to config.model.path.
            media: Storage of the sequences' images.

        Raises:
            ModelError: The model cannot be loaded or trained.
        """
        self.config = config
        self.ranks = ranks = Ranks(ranks.rank, ranks.size, config.training.tp)
        self._media = media
        self.device = pick_device(config.model.device)
        wants_adapters = config.training.lora_rank is not None
        path = config.model.path if wants_adapters or model_path is None else model_path
        self.tokenizer = load_tokenizer(path)
        self.vision = load_vision(path)
        self.scores_rewards = config.training.objective == "reward_model"
        """True for a model with a value head, whose scores are rewards rather than logprobs."""
        self.model = self.load(path, self.loading_device)
        check_vocabulary(self.model, self.tokenizer, path)
        self.vocabulary: int = self.model.get_input_embeddings().weight.shape[0]
        """Number of tokens for which the model has an embedding."""
        if self.scores_rewards:
            self.model.config.pad_token_id = self.tokenizer.pad_token_id  # transformers finds the last token by it
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
        self._scorer = ValueModel(self.model) if self.scores_rewards else None
        prepare_for_training(self.model, config.training, ranks, self.device, root=self._scorer)
        self.reference: Any = None
        """Reference model; with adapters, it is the model itself with its adapters switched off."""
        self.packs = True
        """True if rows of different lengths are packed, rather than padded; see `pack_if_possible`."""

    def load_reference(self, wanted: bool) -> None:
        """Load the reference model if it is wanted, and drop it otherwise."""
        if not wanted or self.scores_rewards:
            self.reference = None
        elif self.adapters is not None:
            self.reference = self.model
        elif self.reference is None:
            self.reference = self.load(self.config.model.path, self.loading_device).requires_grad_(False)
            prepare_for_training(self.reference, self.config.training, self.ranks, self.device)

    def pack_if_possible(self, critic: Any) -> None:
        """Pack rows from now on, if the model, its reference and the critic (or None) can keep packed rows apart."""
        models = (self.model, self.reference, critic)
        self.packs = all(keeps_rows_apart(model) for model in models if model is not None)

    @property
    def loading_device(self) -> torch.device:
        """Device on which a model is loaded, before it is sharded over the ranks."""
        return self.device if self.ranks.size == 1 else torch.device("cpu")

    def load(self, path: str, device: torch.device) -> Any:
        """Load a model of the kind that is trained here, unsharded, from a folder or the hub."""
        if self.scores_rewards:
            return load_value_model(path, self.config.model.dtype, device, "model.path")
        return load_model(path, self.config.model.dtype, device)

    def published_state(self) -> dict[str, Tensor]:
        """Return the policy's parameters and persistent buffers, with adapters merged into them.

        Only rank 0 gets them: see `clew.training.sharding.collect`.
        """
        state = state_of(self.model, self.ranks)
        return state if self.adapters is None else self.adapters.merged(state)

    def parameters(self, *, trained: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters by name: those that are trained, or those that are not."""
        yield from ((name, tensor) for name, tensor in self.model.named_parameters() if tensor.requires_grad == trained)

    # Scoring ---------------------------------------------------------------------------------------------------------

    def score_all(self, tokens: Tokens, plan: Plan) -> np.ndarray:
        """Return the logprobs [S] that the policy gives the trained tokens.

        They are computed in exactly the micro-batches of the loss, so that the same weights give the same bits.
        """
        return self.compute_all(tokens, plan, lambda micro: self.score_micro(micro).logprobs_N)

    def score_reference(self, tokens: Tokens, plan: Plan) -> np.ndarray | None:
        """Return the logprobs [S] of the reference model; None if there is none."""
        if self.reference is None:
            return None
        with nullcontext() if self.adapters is None else self.adapters.off():
            return self.compute_all(tokens, plan, lambda micro: self.score_micro(micro, self.reference).logprobs_N)

    @torch.no_grad()
    def compute_all(self, tokens: Tokens, plan: Plan, compute: Callable[[MicroBatch], Tensor]) -> np.ndarray:
        """Apply `compute` to this rank's micro-batches. Return the numbers of all ranks' tokens [S]; 0 if untrained."""
        numbers_S = self.zeros(tokens)
        for minibatch in plan:
            for micro in self.own_micro_batches(tokens, minibatch):
                numbers_N = compute(micro)
                if not micro.idle:
                    numbers_S[micro.where_N] = numbers_N.cpu().numpy()
        return self.ranks.add_up_shares(numbers_S)

    def score_micro(self, micro: MicroBatch, model: Any = None, *, entropy_gradient: bool = False) -> Scores:
        """Return the scores of a micro-batch from `own_micro_batches`, with gradients outside torch.no_grad().

        Args:
            model: The model that scores, such as the reference; None: the policy.
            entropy_gradient: True if the entropies get gradients, too.
        """
        if self._scorer is not None:
            scores_N = self._scorer(micro.input_ids_BT, micro.rows_N, micro.columns_N, micro.packed)
            return Scores(logprobs_N=scores_N, entropies_N=torch.zeros_like(scores_N))
        return score(
            self.model if model is None else model,
            micro.input_ids_BT,
            micro.rows_N,
            micro.columns_N,
            micro.temperatures_N,
            micro.packed,
            masks=micro.masks,
            image_inputs=micro.image_inputs,
            entropy_gradient=entropy_gradient,
        )

    def zeros(self, tokens: Tokens) -> np.ndarray:
        """Return zeros [S] to hold numbers of tokens: float64 for a float64 model, else float32."""
        return np.zeros(tokens.starts[-1], np.float64 if self.model.dtype == torch.float64 else np.float32)

    # Micro-batches ---------------------------------------------------------------------------------------------------

    def packs_rows(self, tokens: Tokens) -> bool:
        """Return whether these rows are packed.

        Rows with images are not, because models number their positions differently.
        """
        return self.packs and tokens.images is None

    def deal_arguments(self, tokens: Tokens) -> dict[str, Any]:
        """Return the arguments with which `deal` makes micro-batches of these rows for this model and these ranks."""
        return {
            "budget": self.config.training.micro_batch_tokens,
            "packed": self.packs_rows(tokens),
            "ranks": self.ranks.dp_size,
            "width": width_of(self.model),
        }

    def plan(self, tokens: Tokens) -> Plan:
        """Return the plan in which all these rows are one mini-batch."""
        return [deal(tokens.lengths.tolist(), range(len(tokens.ids)), **self.deal_arguments(tokens))]

    def own_micro_batches(self, tokens: Tokens, minibatch: list[list[int]]) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches.

        All ranks must gather the same parameters, including those used only for images. A rank with nothing to compute
        therefore gets an idle micro-batch, and a rank with only text also computes a row with images of another rank.
        """
        for first in range(0, len(minibatch), self.ranks.dp_size):
            at_once = [rows if tokens.trained_in(rows) else [] for rows in minibatch[first:][: self.ranks.dp_size]]
            own = at_once[self.ranks.dp_rank]
            showing = [row for rows in at_once for row in rows if tokens.images and tokens.images[row]]
            if showing and not {*own} & {*showing}:
                yield self._beside_image(tokens, own, min(showing, key=lambda row: tokens.lengths[row]))
            elif own:
                yield self.micro_batch(tokens, own)
            elif any(at_once) and self.ranks.dp_size > 1:
                yield self.placeholder

    def _beside_image(self, tokens: Tokens, rows: list[int], showing: int) -> MicroBatch:
        """Return these rows, which have no images, beside a row that shows some and counts for nothing."""
        if not rows:
            return replace(self.micro_batch(tokens, [showing]), idle=True)
        alone = replace(tokens, loss_mask_S=tokens.loss_mask_S & (tokens.row_of_S != showing))
        return self.micro_batch(alone, [*rows, showing])

    def micro_batch(self, tokens: Tokens, rows: list[int]) -> MicroBatch:
        """Return these rows in the form that the model takes.

        Raises:
            TrainingError: The images do not fit the model, or there is no media folder.
            RecordError: An image cannot be read.
        """
        micro = MicroBatch.of(tokens, rows, self.device, pack=self.packs_rows(tokens))
        if tokens.images is None and self.vision is None:
            return micro
        return replace(micro, image_inputs=self._image_inputs(tokens, rows, micro.input_ids_BT))

    def _image_inputs(self, tokens: Tokens, rows: list[int], input_ids_BT: Tensor) -> dict[str, Tensor]:
        """Return the model's inputs for the images of these rows."""
        if self.vision is None:
            assert tokens.images is not None  # the caller has checked this
            shows = next(name for name, images in zip(tokens.ids, tokens.images, strict=True) if images)
            raise TrainingError(
                f"Cannot train on {shows}: it shows images, and {self.config.model.path} takes none. Use a "
                f"vision-language model, or a batch without images."
            )
        images = [[self._read_image(name) for name in tokens.images[row]] if tokens.images else [] for row in rows]
        for row, images_of_row in zip(rows, images, strict=True):
            ids = tokens.input_ids_S[tokens.starts[row] : tokens.starts[row + 1]].tolist()
            try:
                self.vision.check(ids, images_of_row)
            except ImageError as error:
                raise TrainingError(f"{tokens.ids[row]}: {error} Was it recorded with another processor?") from None
        return self.vision.inputs(input_ids_BT, images, self.model.dtype)

    def _read_image(self, name: str) -> bytes:
        if self._media is None:
            raise TrainingError(f"Cannot load image {name}: this policy was created without a media folder.")
        return self._media.read(name)

    @cached_property
    def placeholder(self) -> MicroBatch:
        """Idle micro-batch of two meaningless tokens."""
        nothing = Tokens(
            ids=["idle"],
            starts=np.array([0, 2]),
            input_ids_S=np.zeros(2, np.int32),
            loss_mask_S=np.array([False, True]),
            temperatures_S=np.ones(2, np.float32),
        )
        return replace(MicroBatch.of(nothing, [0], self.device), idle=True)


def check_tokens(tokens: Tokens, model: Any, name: str) -> None:
    """Raise TrainingError for rows that are too long for a model, or have tokens for which it has no embedding."""
    context, field = context_in(model.config)
    longest = tokens.lengths.max()
    if context is not None and longest > context and not positions_go_on(model.config):
        raise TrainingError(
            f"Cannot train on {tokens.ids[tokens.lengths.argmax()]}: it has {longest} tokens, and {name} takes at most "
            f"{context} ({field}). Limit the length of episodes, or use a model with a longer context."
        )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = tokens.mask_ids
    if ids is not None and len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
        raise TrainingError(
            f"sampling_mask_ids of this batch go from {ids.min()} to {ids.max()}; {name} has embeddings for the IDs 0 "
            f"to {vocabulary - 1}."
        )
    unknown = np.flatnonzero((tokens.input_ids_S < 0) | (tokens.input_ids_S >= vocabulary))
    if len(unknown):
        at = int(unknown[0])
        row = tokens.row_of_S[at]
        raise TrainingError(
            f"token {at - tokens.starts[row]} of {tokens.ids[row]} is {tokens.input_ids_S[at]}; {name} has "
            f"embeddings for the IDs 0 to {vocabulary - 1}."
        )
