"""Credit of an episode's turns: each gets its own reward and, discounted, the mean return of the turns after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC

from clew.gateway.interactions import Interaction


def turn_returns(
    chains: SequenceABC[SequenceABC[Interaction]], episode_reward: float, rewards: Mapping[str, float], discount: float
) -> dict[str, float]:
    """Return each interaction's return, the number that it is trained on, by interaction ID.

    return = own reward + discount x mean of the returns of the turns that follow it. For a turn that no other follows,
    return = own reward + the episode's reward. So with a discount of 1 and no rewards of single turns, each
    return is the episode's reward. With branches (parallel calls, sub-agents), a turn before them gets their average.

    A turn follows the one that the gateway named (details["follows"]), which is in another chain if the context was
    rewritten. If it named none, the turn follows the one before it in its chain.

    Args:
        chains: The interactions of each sequence (`assemble`).
        rewards: Rewards of single turns, by interaction ID.
    """
    children: dict[str | None, list[str]] = defaultdict(list)
    for chain in chains:
        for before, interaction in zip([None, *chain], chain, strict=False):
            parent = interaction.details.get("follows", before.id if before is not None else None)
            children[parent].append(interaction.id)
    returns: dict[str, float] = {}
    by_index = sorted((interaction for chain in chains for interaction in chain), key=lambda each: -each.index)
    for interaction in by_index:  # latest first, so that the returns of later turns are known
        after = [returns[id] for id in children[interaction.id]]
        # Written so that the mean of equal returns is exactly that return: rewards are compared for equality.
        mean = after[0] + sum(each - after[0] for each in after) / len(after) if after else 0.0
        future = discount * mean if after else episode_reward
        returns[interaction.id] = rewards.get(interaction.id, 0.0) + future
    return returns
