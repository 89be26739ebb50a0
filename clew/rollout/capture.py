"""Interactions, and how those of an episode become sequences: the exact tokens, each trained on once.

::

    i0   [prompt ........][output .....]
    i1   [prompt ........][output .....][next turn ...][output ...]     extends i0's exact tokens: the same sequence
    i2   [rewritten context ........][output ..]                        does not: a new sequence
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from clew.inference.protocol import Completion, SamplingParams

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
    """Log-probability of each output token, under the distribution after temperature and before truncation."""
    versions: list[int]
    """Version of the weights that made each output token."""
    finish_reason: str
    """Reason for the end of the output: stop or length."""
    text: str
    """Output text, decoded without special tokens: for rewards and people, never tokenized again for training."""
    params: SamplingParams
    images: tuple[str, ...] = ()
    """Names in media/ of the images that `input_ids` show, in order."""
    prompt: str | list[dict[str, Any]] | None
    """Text or messages that `input_ids` render, if the workflow gave them: for people."""
    started_at: float
    finished_at: float
    matched: int | str | None = None
    """Stop token ID or stop string that ended the output."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further entries for the record, such as the name of the model that a client asked for."""

    @classmethod
    def of(cls, completion: Completion, **known: Any) -> Interaction:
        """Return the interaction of an engine's completion and the fields that were known before."""
        return cls(
            output_ids=completion.output_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            matched=completion.matched,
            **known,
        )

    @cached_property
    def all_ids(self) -> list[int]:
        return self.input_ids + self.output_ids

    def as_dict(self) -> dict[str, Any]:
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


def assemble(interactions: SequenceABC[Interaction], *, individual: bool = False) -> list[list[Interaction]]:
    """Return the interactions of each sequence, in the order of their indices.

    An interaction extends the longest earlier sequence whose exact tokens and images its input begins with. If there is
    none, it starts a new sequence. So each output belongs to exactly one sequence, even when interactions ran side by
    side.

    Args:
        interactions: All interactions of an episode, in any order.
        individual: Make each interaction a sequence of its own.
    """
    sequences: list[list[Interaction]] = []
    for interaction in sorted(interactions, key=lambda each: each.index):
        extended: list[Interaction] | None = None
        for sequence in sequences if not individual else ():
            tokens = sequence[-1].all_ids
            shown = sequence[-1].images
            begins_with = interaction.input_ids[: len(tokens)] == tokens and interaction.images[: len(shown)] == shown
            if begins_with and (extended is None or len(tokens) > len(extended[-1].all_ids)):
                extended = sequence
        if extended is None:
            sequences.append([interaction])
        else:
            extended.append(interaction)
    return sequences


def aligned(sequence: SequenceABC[Interaction]) -> dict[str, np.ndarray]:
    """Return the aligned columns of a sequence's row: arrays of length T in which entry i belongs to token i."""
    input_ids = np.array(sequence[-1].all_ids, np.int32)
    columns = {
        "input_ids": input_ids,
        "loss_mask": np.zeros(len(input_ids), np.bool_),
        "logprobs": np.zeros(len(input_ids), np.float32),
        "versions": np.full(len(input_ids), -1, np.int32),
        "turn_ids": np.full(len(input_ids), -1, np.int32),
        "temperatures": np.ones(len(input_ids), np.float32),
    }
    for interaction in sequence:
        generated = slice(len(interaction.input_ids), len(interaction.all_ids))
        columns["loss_mask"][generated] = True
        columns["logprobs"][generated] = interaction.logprobs
        columns["versions"][generated] = interaction.versions
        columns["turn_ids"][generated] = interaction.index
        columns["temperatures"][generated] = interaction.params.temperature or 1.0
    return columns
