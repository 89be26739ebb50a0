"""One request to the model and its response, with the exact tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from clew.inference.protocol import Completion, SamplingParams, Span

TOKENS = ("input_ids", "output_ids", "logprobs", "versions")
"""The fields of an interaction that a sequence's columns hold."""


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """One request to the model and its response."""

    id: str
    index: int
    """Number of the request in its episode, from 0."""
    input_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    """Log-probability of each output token, under the distribution after temperature and before truncation, or
    relative to `sampling_mask`."""
    versions: list[int]
    """Version of the weights that made each output token."""
    finish_reason: str
    """Reason for the end of the output: stop or length."""
    text: str
    """Output text, decoded without special tokens: for rewards and people, never tokenized again for training."""
    params: SamplingParams
    images: tuple[str, ...] = ()
    """Names in media/ of the images that `input_ids` show, in order."""
    sampling_mask: list[list[int]] | None = None
    """IDs that each output token was drawn from. For this and the next two fields see `Completion`."""
    sampled_by: list[Span] = field(default_factory=list)
    routed_experts: np.ndarray | None = None
    prompt: str | list[dict[str, Any]] | None
    """Text or messages that were turned into `input_ids`, if the workflow gave them; for display only."""
    started_at: float
    finished_at: float
    matched: int | str | None = None
    """Stop token ID or stop string that ended the output."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further entries for the record, such as the name of the model that a client asked for."""

    @classmethod
    def of(cls, completion: Completion, **fields: Any) -> Interaction:
        """Build an interaction from an engine's completion and the remaining fields."""
        return cls(
            output_ids=completion.output_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            matched=completion.matched,
            sampling_mask=completion.sampling_mask,
            sampled_by=completion.sampled_by,
            routed_experts=completion.routed_experts,
            **fields,
        )

    @cached_property
    def all_ids(self) -> list[int]:
        return self.input_ids + self.output_ids

    def is_extended_by(self, input_ids: list[int], images: Sequence[str]) -> bool:
        """Return whether a prompt begins with exactly this interaction's tokens and images (by name).

        This alone decides whether a later interaction continues the same sequence. Names are compared
        because two images may have the same tokens.
        """
        tokens, shown = self.all_ids, self.images
        return input_ids[: len(tokens)] == tokens and tuple(images[: len(shown)]) == shown

    def record_entry(self) -> dict[str, Any]:
        """Return the fields that the record keeps besides the tokens."""
        sampling = {name: value for name, value in vars(self.params).items() if name not in ("seed", "continues")}
        return {
            "id": self.id,
            "turn": self.index,
            "prompt": self.prompt,
            "completion": self.text,
            "finish_reason": self.finish_reason,
            "matched": self.matched,
            "input_tokens": len(self.input_ids),
            "output_tokens": len(self.output_ids),
            "sampling": sampling,
            "seed": self.params.seed,
            **({"images": list(self.images)} if self.images else {}),
            "started_at": self.started_at,
            "finished_at": self.finished_at,
            **self.details,
        }
