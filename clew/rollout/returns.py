"""Conversion of rewards to returns: a discount for turns, applied from the leaves of the turn tree to its root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clew.rollout.capture import Interaction


def turn_returns(
    chains: Sequence[Sequence[Interaction]], episode: float, rewards: Mapping[str, float], discount: float
) -> dict[str, float]:
    """Return each interaction's return, the number that it is trained on, by interaction ID.

    return = own reward + discount x mean of the returns of the turns that follow it. The episode's reward is added to
    the own reward of each leaf. So with a discount of 1 and no rewards of single turns, each return is the episode's
    reward. With branches (parallel calls, sub-agents), a turn before them gets their average.

    A turn follows the one before it in its chain, or the one that the gateway named, if the chain could not go on
    because the context was rewritten.

    Args:
        chains: The interactions of each sequence (`capture.assemble`).
        episode: Reward of the episode.
        rewards: Rewards of single turns, by interaction ID.
        discount: Factor for each turn.
    """
    parents: dict[str, str | None] = {}
    for chain in chains:
        for place, interaction in enumerate(chain):
            before = chain[place - 1].id if place else None
            parents[interaction.id] = interaction.details.get("follows", before)
    children: dict[str, list[str]] = {id: [] for id in parents}
    for id, parent in parents.items():
        if parent in children:
            children[parent].append(id)
    returns: dict[str, float] = {}
    by_index = sorted((interaction for chain in chains for interaction in chain), key=lambda each: -each.index)
    for interaction in by_index:  # a turn comes before those that follow it
        after = [returns[id] for id in children[interaction.id]]
        future = discount * (sum(after) / len(after)) if after else episode
        returns[interaction.id] = rewards.get(interaction.id, 0.0) + future
    return returns
