"""One request to the model and its response, with the exact tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from clew.inference.protocol import Completion, SamplingParams

TOKENS = ("input_ids", "output_ids", "logprobs", "versions")
"""The fields of an interaction that a sequence's columns hold."""


@dataclass(frozen=True, kw_only=True)
class Interaction(Completion):
    """One request to the model and its response: the completion, and what it completes."""

    id: str
    index: int
    """Number of the request in its episode, from 0."""
    input_ids: list[int]
    text: str
    """Output text, decoded without special tokens: for rewards and people, never tokenized again for training."""
    params: SamplingParams
    images: tuple[str, ...] = ()
    """Names in media/ of the images that `input_ids` show, in order."""
    prompt: str | list[dict[str, Any]] | None
    """Text or messages that were turned into `input_ids`, if the workflow gave them; for display only."""
    started_at: float
    finished_at: float
    details: dict[str, Any] = field(default_factory=dict)
    """Further entries for the record, such as the name of the model that a client asked for."""

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
