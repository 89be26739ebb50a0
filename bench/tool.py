"""Episodes that wait for a tool between two generations, for as long as their ID says."""

from __future__ import annotations

import asyncio
import hashlib
import math
from statistics import NormalDist
from typing import Any

from bench.rewards import digits
from clew.gateway.episode_engine import EpisodeEngine
from clew.rollout.reward_function import total

SHORTEST_S, LONGEST_S = 0.05, 2.0
MEDIAN_S, SIGMA = 0.2, 1.0


def latency(episode_id: str) -> float:
    """Seconds that the tool takes in this episode: log-normal, clipped. IDs follow from the data order, so each run and
    each simulation sees the same."""
    uniform = (int.from_bytes(hashlib.sha256(episode_id.encode()).digest()[:6], "big") + 0.5) / 2**48
    return min(LONGEST_S, max(SHORTEST_S, MEDIAN_S * math.exp(SIGMA * NormalDist().inv_cdf(uniform))))


class ToolUser:
    """Generate, wait for the tool, generate again."""

    async def run_episode(self, engine: EpisodeEngine, data: dict[str, Any]) -> float:
        """The reward is that of the second answer."""
        prompt: Any = engine.tokenizer(data[engine.prompt_column])
        first = await engine.generate(prompt["input_ids"])
        await asyncio.sleep(latency(engine.episode_id))
        second = await engine.generate(first.all_ids)
        return total(digits(second.text, data))
