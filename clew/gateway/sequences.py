"""The sequences of an episode: how its interactions become rows of the record, each token trained on once.

::

    i0   [prompt ........][output .....]
    i1   [prompt ........][output .....][next turn ...][output ...]     extends i0's exact tokens: the same sequence
    i2   [rewritten context ........][output ..]                        does not: a new sequence
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as SequenceABC
from typing import Any

import numpy as np

from clew.gateway.episode_engine import EpisodeEngine
from clew.gateway.interactions import Interaction
from clew.gateway.turn_returns import turn_returns
from clew.inference.protocol import shift_spans
from clew.record.rows import Sequence


def assemble(interactions: SequenceABC[Interaction], *, individual: bool = False) -> list[list[Interaction]]:
    """Return the interactions of each sequence, in the order of their indices.

    An interaction extends the longest earlier sequence whose exact tokens and images its input begins with. If there is
    none, or if each is to be `individual`, it starts a new sequence. So each output belongs to exactly one sequence,
    even when interactions ran side by side.
    """
    sequences: list[list[Interaction]] = []
    for interaction in sorted(interactions, key=lambda each: each.index):
        ids, images = interaction.input_ids, interaction.images
        extended = [each for each in sequences if not individual and each[-1].is_extended_by(ids, images)]
        if extended:
            max(extended, key=lambda each: len(each[-1].all_ids)).append(interaction)
        else:
            sequences.append([interaction])
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


def reported(sequence: SequenceABC[Interaction]) -> dict[str, Any]:
    """Return the optional columns of a sequence's row: what the engine says about how the tokens were drawn."""
    columns: dict[str, Any] = {}
    if any(interaction.sampling_mask is not None for interaction in sequence):
        counts = np.zeros(len(sequence[-1].all_ids), np.int32)
        ids: list[int] = []
        for interaction in sequence:
            masks = interaction.sampling_mask or [[] for _ in interaction.output_ids]
            counts[len(interaction.input_ids) : len(interaction.all_ids)] = list(map(len, masks))
            ids += itertools.chain.from_iterable(masks)
        columns |= {"sampling_mask_counts": counts, "sampling_mask_ids": np.array(ids, np.int32)}
    spans = [span for each in sequence for span in shift_spans(each.sampled_by, len(each.input_ids))]
    experts: np.ndarray | None = None
    for interaction in sequence:  # entry i: the experts chosen when token i was the input
        new = interaction.routed_experts
        experts = new if experts is None or new is None else np.concatenate([experts, new[len(experts) :]])
        if experts is None:
            break
    return columns | {"sampled_by": spans or None, "routed_experts": experts}


def with_returns(
    engine: EpisodeEngine, rewards: dict[str, float]
) -> list[tuple[list[Interaction], float, dict[str, float]]]:
    """Return the chains of an episode's interactions, with the return of each one's first turn, and its named parts.

    Args:
        rewards: Reward of the episode as named numbers, whose sum is what is trained on.
    """
    total = math.fsum(rewards.values())
    chains = assemble(engine.interactions, individual=engine.resources.individual)
    whole = assemble(engine.interactions)  # `individual` changes the rows, but not which turns follow a turn
    returns = turn_returns(whole, total, engine.turn_rewards, engine.resources.turn_discount)

    def named(value: float) -> dict[str, float]:
        if math.isnan(value):
            return {}
        # The named parts add up to the episode's reward. A turn that got another number has only that one.
        return rewards if value == total else {"reward": value}

    return [(chain, returns[chain[0].id], named(returns[chain[0].id])) for chain in chains]


def sequences_of(engine: EpisodeEngine, rewards: dict[str, float], columns: dict[str, Any]) -> list[Sequence]:
    """Return the rows of an episode, one for each sequence. Their rewards are the returns of their first interactions.

    Args:
        rewards: Reward of the episode as named numbers, whose sum is what is trained on.
        columns: Columns that do not follow from the interactions.
    """
    for interaction in engine.interactions:
        if interaction.id in engine.turn_rewards:
            interaction.details["reward"] = engine.turn_rewards[interaction.id]
    return [
        Sequence(
            id=f"{engine.episode_id}.s{number}",
            reward=value,
            rewards=parts,
            finish_reason=chain[-1].finish_reason,
            interactions=[interaction.record_entry() for interaction in chain],
            images=list(chain[-1].images),
            **aligned(chain),
            **reported(chain),
            **columns,
        )
        for number, (chain, value, parts) in enumerate(with_returns(engine, rewards))
    ]
