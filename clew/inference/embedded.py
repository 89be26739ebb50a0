"""The embedded engine: continuous batching over a cache of rows.

One `step`: admit requests from the queue (one prefill for equal prompts), feed each row's last token to the model, draw
the next ones, release the rows that ended.

For small models, Python and the launch of each torch operation decide the speed. These things made it fast:

- the layout of `RowCache`: no gather, and no mask to build in a step;
- ids and logprobs that stay in tensors;
- everything about the rows (parameters, stop IDs) computed only when rows come or go;
- uniform numbers computed for 32 steps at once;
- one Python integer, the tick at which the next row reaches its limit, compared in place of all lengths;
- `clew.inference.llama_forward` for the commonest architecture.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from clew.errors import described
from clew.inference import attention, llama_forward
from clew.inference.cache import PrefillCache, RowCache, columns_for, moves
from clew.inference.engine_core import AbortTarget, Core, Finished, matches
from clew.inference.protocol import FinishReason, GenerateRequest, RequestTooLong
from clew.inference.reference import ReferenceEngine
from clew.inference.request_checks import matched_stop
from clew.inference.sampling import RowParams, choose, uniform
from clew.models.loading import is_out_of_memory
from clew.models.vision import Vision

log = logging.getLogger("clew.inference")

_UNIFORM_STEPS = 32
"""Number of steps for which uniform numbers are drawn at once."""
_PREFILL_TOKENS = 16384
"""Maximum number of tokens, padding included, in one prefill."""
SEEN_TOLERANCE = 1e-4
"""Largest allowed difference, in nats, between the logprobs of the cached and the plain path of a float32 model that
takes images. It is small, to find models (Gemma 3) in which an image's tokens attend to later ones: the cached path
would compute them wrongly.
"""
_PATIENCE = 4
"""Maximum number of steps for which requests wait although a row is free, so that one prefill can fill several rows."""

Prompt = tuple[tuple[int, ...], tuple[bytes, ...]]
"""Tokens and images of a request. Requests with equal ones share a prefill."""


@dataclass(eq=False, slots=True)
class Row:
    """A running sequence. A tick is a decoding step, counted from the engine's start."""

    request: GenerateRequest
    stop_ids: tuple[int, ...]
    limit: int
    """Length of prompt and output together at which it ends."""
    first_tick: int
    """Tick at which its first token was drawn; it draws one token at each tick from then on."""
    masks: list[Tensor] | None
    """IDs that each of its tokens was drawn from; None if nothing is cut off, or nobody asked."""
    last_tick: int = field(init=False)
    """Tick at which its last possible token is drawn."""
    stops_from_tick: int = field(init=False)
    """First tick at which it may draw a stop ID."""
    watched: bool = field(init=False)
    """True if its tokens are examined one by one, for stop strings or streaming."""

    def __post_init__(self) -> None:
        request = self.request
        self.last_tick = self.first_tick + self.limit - len(request.input_ids) - 1
        self.stops_from_tick = self.first_tick + (request.params.min_new_tokens if self.stop_ids else 0)
        self.watched = bool(request.params.stop) or request.on_token is not None


class EmbeddedEngine(Core):
    """Fast engine: continuous batching over a cache of rows. See `Core` for the interface."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        vision: Vision | None = None,
        *,
        max_running: int = 128,
        cache_gib: float = 1.0,
    ) -> None:
        """Create the engine. It takes over the model: `clew.inference.attention` replaces the model's attention."""
        super().__init__(model, tokenizer, vision)
        self.max_running = max_running
        model.set_attn_implementation(attention.NAME if vision is None else {"text_config": attention.NAME})
        self._fused = llama_forward.build(model)
        self.cache = RowCache(self.device, int(cache_gib * 2**30))
        self.cache.bytes_per_token = self._prefill([[0]])[0].bytes_per_token()
        self._rows: list[Row] = []
        """Running sequences, in the order of the cache's rows. A row's index changes when another row ends."""
        self._tick = 0
        self._steps_held = 0  # see `_PATIENCE`
        self._rows_changed()

    def running(self) -> int:
        return len(self._rows)

    def submit(self, request: GenerateRequest) -> None:
        super().submit(request)
        limit = self.limit(request)
        if not self.cache.fits(1, limit):
            self.waiting.pop()
            needed = columns_for(limit) * self.cache.bytes_per_token / 2**30
            raise RequestTooLong(
                f"a request of up to {limit} tokens (prompt {len(request.input_ids)}, "
                f"max_new_tokens {request.params.max_new_tokens}) needs {needed:.3f} GiB of cache; "
                f"inference.cache_gib is {self.cache.budget / 2**30:g}. Raise it, or ask for "
                f"fewer tokens."
            )

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        finished: list[Finished] = []
        if self.waiting and self._admits_now():
            finished = self._admit()
        if self._rows:
            logits = self._decode(self.cache)
            self.cache.advance(self._longest)
            self._tick += 1
            finished += self._draw(logits, 0)
        return finished

    # Admission -------------------------------------------------------------------------------------------------------

    def _admits_now(self) -> bool:
        """Return whether to admit requests in this step, and count the steps in which they are held back."""
        free_rows = self.max_running - len(self._rows)
        if not free_rows:
            return False
        if self._rows and free_rows * 8 < self.max_running and self._steps_held < _PATIENCE:
            self._steps_held += 1
            return False
        self._steps_held = 0
        return True

    def _admit(self) -> list[Finished]:
        """Move requests from the queue to new rows, in order, as far as the cache and the size of a prefill allow."""
        admitted: list[GenerateRequest] = []
        prompts: dict[Prompt, int] = {}  # the admitted requests' different prompts, and the row of each in the prefill
        sources: list[int] = []  # the row in the prefill of each admitted request
        longest = max((row.limit for row in self._rows), default=0)
        prefill_width = 0
        while self.waiting and len(self._rows) + len(admitted) < self.max_running:
            request = self.waiting[0]
            longest_with_it = max(longest, self.limit(request))
            if not self.cache.fits(len(self._rows) + len(admitted) + 1, longest_with_it):
                break
            prompt = tuple(request.input_ids), request.images
            prefill_width = max(prefill_width, len(request.input_ids))
            if prompt not in prompts:
                alone = request.images or any(images for _, images in prompts)  # with images: a prefill of its own
                if prompts and (alone or (len(prompts) + 1) * prefill_width > _PREFILL_TOKENS):
                    break
                prompts[prompt] = len(prompts)
            admitted.append(self.waiting.popleft())
            sources.append(prompts[prompt])
            longest = longest_with_it
        if not admitted:
            return []

        ids, images = [list(prompt) for prompt, _ in prompts], admitted[0].images
        filled, logits, position_offset = self._prefill(ids, images)
        self.cache.join(filled, sources, [request.input_ids for request in admitted], longest, position_offset)
        first_row = len(self._rows)
        for request in admitted:
            masks = [] if request.sampling_mask and request.params.truncates(self.vocab) else None
            stop_ids = request.params.stop_ids(self.default_stop_ids)
            self._rows.append(Row(request, stop_ids, self.limit(request), self._tick, masks))
        self._rows_changed()
        if len(prompts) < len(admitted):
            logits = logits[sources]
        return self._draw(logits, first_row)

    # The model -------------------------------------------------------------------------------------------------------

    def _prefill(self, prompts: list[list[int]], images: Sequence[bytes] = ()) -> tuple[PrefillCache, Tensor, int]:
        """Compute several prompts together, all ending in the last column, or one prompt that shows images.

        Returns:
            The keys and values, the logits [prompts, vocab] after the prompts, and the number to add to the positions
            of what follows. It is not 0 after an image whose positions have two dimensions: such an image takes fewer
            positions than tokens.
        """
        if images:
            return self._prefill_with_images(prompts[0], images)
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        ids = torch.tensor(
            [[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)], device=self.device
        )
        starts = torch.tensor(padding, device=self.device)
        positions = (torch.arange(width, device=self.device) - starts[:, None]).clamp_(min=0)
        filled = PrefillCache()
        rows = attention.Rows(None, starts if any(padding) else None)
        return filled, self._forward(ids, positions, filled, rows, width), 0

    def _prefill_with_images(self, prompt: list[int], images: Sequence[bytes]) -> tuple[PrefillCache, Tensor, int]:
        """Compute one prompt with images, whose positions the model computes. Returns what `_prefill` returns."""
        assert self.vision is not None, "requests with images were refused"
        filled, ids_1T = PrefillCache(), torch.tensor([prompt], device=self.device)
        shown = self.vision.inputs(ids_1T, [images], self.model.dtype)
        with attention.attending_to(attention.Rows(None)):
            output = self.model(ids_1T, past_key_values=filled, use_cache=True, logits_to_keep=1, **shown)
        offset = getattr(self.model.base_model, "rope_deltas", None)
        return filled, output.logits[:, -1], 0 if offset is None else int(offset.item())

    def _decode(self, cache: RowCache) -> Tensor:
        """Feed each row's token at `column` to the model; return logits [rows, vocab]."""
        n, column = cache.rows, cache.column
        ids = cache.tokens[:n, column : column + 1]
        positions = column - cache.origins_R1
        return self._forward(ids, positions, cache, attention.Rows(cache.step_mask()), column - cache.first_column + 1)

    def _forward(
        self, ids_RT: Tensor, positions_RT: Tensor, cache: Cache, rows: attention.Rows, longest: int
    ) -> Tensor:
        """Run the model, fused if possible; return logits [rows, vocab] after the last token.

        Args:
            longest: A number above every position.
        """
        with attention.attending_to(rows):
            if self._fused is not None:
                return self._fused.forward(ids_RT, positions_RT, cache, longest)
            output = self.model(
                ids_RT, position_ids=positions_RT, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            return output.logits[:, -1]

    @torch.inference_mode()
    def logprobs(self, input_ids: list[int], images: Sequence[bytes] = ()) -> Tensor:
        """Return the logprobs [vocab] of the next token, by prefill and, with two or more tokens, one cached step."""
        *prompt, last = input_ids
        if not prompt:
            logits = self._prefill([input_ids])[1]
        else:
            cache = RowCache(self.device, self.cache.budget)
            filled, _, position_offset = self._prefill([prompt], images)
            cache.join(filled, [0], [prompt], len(input_ids), position_offset)
            cache.tokens[0, cache.column] = last
            logits = self._decode(cache)
        return torch.log_softmax(logits.float(), -1)[0]

    @torch.inference_mode()
    def logprobs_together(self, prompts: list[list[int]]) -> Tensor:
        """Return the logprobs [prompts, vocab] of the token after each prompt, by one prefill, which pads them."""
        return torch.log_softmax(self._prefill(prompts)[1].float(), -1)

    # Drawing and ending ----------------------------------------------------------------------------------------------

    def _rows_changed(self) -> None:
        """Compute everything that stays the same until rows come or go again."""
        rows = self._rows
        self._longest = max((row.limit for row in rows), default=0)
        self._next_last_tick = min((row.last_tick for row in rows), default=0)
        self._all_stop_from_tick = max((row.stops_from_tick for row in rows), default=0)
        self._watched = [index for index, row in enumerate(rows) if row.watched]
        self._masked = [index for index, row in enumerate(rows) if row.masks is not None]
        self._uniforms_from_tick = -_UNIFORM_STEPS  # none yet
        self._stops = self._bans = None
        if not rows:
            return
        self._params = self._stack(rows)
        widest = max(len(row.stop_ids) for row in rows)
        if widest:
            padded = [[*row.stop_ids, *[-1] * (widest - len(row.stop_ids))] for row in rows]
            self._stops = torch.tensor(padded, device=self.device)

    def _stack(self, rows: list[Row]) -> RowParams:
        return RowParams.stack([row.request.params for row in rows], self.vocab, self.device)

    def _draw(self, logits: Tensor, first_row: int) -> list[Finished]:
        """Draw the next token of the rows from `first_row` on (all, or those just admitted). Release those that end."""
        cache = self.cache
        n, column = cache.rows, cache.column
        params = self._params if first_row == 0 else self._stack(self._rows[first_row:])
        banned = self._banned()[first_row:] if self._tick < self._all_stop_from_tick else self.never_drawn
        drawn = choose(logits, params, self._uniforms_now()[first_row:], banned)
        if masked := [index for index in self._masked if index >= first_row]:
            for index, mask in zip(masked, drawn.masks([index - first_row for index in masked]), strict=True):
                self._rows[index].masks.append(mask)  # pyright: ignore[reportOptionalMemberAccess]
        ids, logprobs, _ = drawn
        cache.tokens[first_row:n, column] = ids
        cache.logprobs[first_row:n, column] = logprobs

        ended: dict[int, tuple[FinishReason, int | str | None]] = {}
        if self._next_last_tick <= self._tick:
            ended = {
                index: ("length", None) for index in range(first_row, n) if self._rows[index].last_tick <= self._tick
            }
        for index in self._watched:
            if index >= first_row and (matched := self._watch(index)) is not None:
                ended[index] = ("stop", matched)
        if self._stops is not None:  # last: a stop ID that is also the last possible token counts as a stop
            hits = (ids.unsqueeze(1) == self._stops[first_row:]).any(1)
            if hits.any():
                for offset in hits.nonzero().flatten().tolist():
                    ended[first_row + offset] = ("stop", int(ids[offset]))
        return self._release(ended) if ended else []

    def _uniforms_now(self) -> Tensor:
        """Return the uniform number of each row for the token at this tick."""
        step = self._tick - self._uniforms_from_tick
        if step >= _UNIFORM_STEPS:
            now = [len(row.request.input_ids) + self._tick - row.first_tick for row in self._rows]
            steps = torch.arange(_UNIFORM_STEPS, device=self.device)
            positions = torch.tensor(now, device=self.device)[:, None] + steps
            self._uniforms = uniform(self._params.seeds[:, None], positions)
            self._uniforms_from_tick, step = self._tick, 0
        return self._uniforms[:, step]

    def _banned(self) -> Tensor:
        """Return the mask [rows, vocab] of stop IDs that may not be drawn yet, because of min_new_tokens."""
        if self._bans is None or self._tick >= self._bans_until_tick:
            bound = {index: row for index, row in enumerate(self._rows) if self._tick < row.stops_from_tick}
            assert bound, "there is such a row before `_all_stop_from_tick`"
            pairs = [(index, token) for index, row in bound.items() for token in row.stop_ids]
            self._bans = torch.zeros(len(self._rows), self.vocab, dtype=torch.bool, device=self.device)
            self._bans[tuple(torch.tensor(pairs, device=self.device).T)] = True
            if self.never_drawn is not None:
                self._bans |= self.never_drawn
            self._bans_until_tick = min(row.stops_from_tick for row in bound.values())
        return self._bans

    def _watch(self, index: int) -> str | None:
        """Stream the row's newest token; return the stop string that it completes, if any."""
        row, column = self._rows[index], self.cache.column
        if row.request.on_token:
            row.request.on_token(int(self.cache.tokens[index, column]), float(self.cache.logprobs[index, column]))
        if not row.request.params.stop:
            return None
        return matched_stop(row.request, self._output(index, self.cache.tokens), self.tokenizer)

    def _output(self, index: int, tokens_or_logprobs: Tensor) -> list[Any]:
        """Return the tokens, or the logprobs, of a row's output so far."""
        begin = self.cache.start_columns[index] + len(self._rows[index].request.input_ids)
        return tokens_or_logprobs[index, begin : self.cache.column + 1].tolist()

    def _release(self, ended: dict[int, tuple[FinishReason, int | str | None]]) -> list[Finished]:
        """Return the completions of these rows, and move the last rows into their places."""
        finished: list[Finished] = []
        for index, (reason, matched) in ended.items():
            row, ids = self._rows[index], self._output(index, self.cache.tokens)
            logprobs = self._output(index, self.cache.logprobs)
            finished.append((row.request, self.completion(ids, logprobs, reason, matched, row.masks)))
        leaving = list(ended)
        for source, target in zip(*moves(len(self._rows), leaving), strict=True):
            self._rows[target] = self._rows[source]
        del self._rows[len(self._rows) - len(leaving) :]
        self.cache.remove(leaving)
        self._rows_changed()
        return finished

    def _abort_running(self, which: AbortTarget) -> list[Finished]:
        chosen = [index for index, row in enumerate(self._rows) if matches(row.request, which)]
        return self._release({index: ("abort", None) for index in chosen}) if chosen else []

    def cache_bytes(self) -> int:
        return self.cache.memory()

    def _drop_cache(self) -> None:
        empty = RowCache(self.device, self.cache.budget)
        empty.bytes_per_token = self.cache.bytes_per_token
        self.cache = empty


def build_engine(
    model: Any, tokenizer: Any, vision: Vision | None = None, *, max_running: int = 128, cache_gib: float = 1.0
) -> Core:
    """Return the embedded engine if it serves this model correctly, else the slow reference, with a warning in the log.

    The fast path must agree with the plain model on a short sequence (with an image, if the model takes images) and on
    two sequences that are prefilled together.
    """
    reason = _unsupported(model)
    if reason is None:
        reference = ReferenceEngine(model, tokenizer, vision)
        length = min(14, reference.context)
        ids = torch.randint(0, reference.vocab, (length,), generator=torch.Generator().manual_seed(0)).tolist()
        images = [] if vision is None else [_stripes()]
        if vision is not None:
            ids = [*vision.tokens_of(images[0]), *(each for each in ids if each != vision.image_id)]
        together = [ids[-6:], ids[-3:]]  # text alone
        expected = [reference.logprobs(ids, images), *map(reference.logprobs, together)]
        plain = model.config._attn_implementation
        tolerance = 10 * reference.probe_tolerance
        if vision is not None and model.dtype == torch.float32:
            tolerance = SEEN_TOLERANCE
        try:
            engine = EmbeddedEngine(model, tokenizer, vision, max_running=max_running, cache_gib=cache_gib)
            found = [engine.logprobs(ids, images), *engine.logprobs_together(together)]
        except Exception as error:  # an architecture may raise anything at a call that it was not made for
            if is_out_of_memory(error):
                raise
            reason = f"the cached path fails ({described(error)})"
        else:
            largest = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
            if largest <= tolerance:
                return engine
            reason = f"the cached path's logprobs differ from the plain model's by {largest:.2g}"
        model.set_attn_implementation(plain)
    log.warning("%s is served by the slow reference, one sequence at a time: %s", type(model).__name__, reason)
    return ReferenceEngine(model, tokenizer, vision)


def _stripes() -> bytes:
    """Return an image to test with."""
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.fromarray(np.linspace(0, 2000, 64 * 64 * 3).astype(np.uint8).reshape(64, 64, 3)).save(file, "PNG")
    return file.getvalue()


def _unsupported(model: Any) -> str | None:
    """Return why the cached path cannot serve this model; None if it can."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of kind {', '.join(sorted(kinds))}"
    if model._is_stateful:
        return "it keeps a state that is not attention"
    if not model._supports_attention_backend:
        return "its attention cannot be replaced through transformers' AttentionInterface"
    return None
