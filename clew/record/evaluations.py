"""evals/: the evaluations on held-out prompts, one for each version of the weights that was due."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from clew.reading import Count, Number, check, read_json
from clew.record import chain, rows
from clew.record.files import write_bytes

MEASURES = re.compile(
    r"eval\.(path|temperature|pass_above)$|rollout\.(reward|agent|workflow|max_turns|max_episode_tokens)$|"
    r"rollout\.workflow_kwargs\."
)
"""Matches the fields of the configuration that decide what an evaluation measures."""


class Evaluated(TypedDict):
    """Content of an evaluation's JSON. It also has numbers named pass@1 and so on."""

    version: Count
    reward: NotRequired[Number | None]
    rewards: NotRequired[dict[str, Number | None]]
    length: NotRequired[Number | None]
    truncated: NotRequired[Number | None]
    episodes: NotRequired[Number | None]
    failed: NotRequired[Number | None]
    loss: NotRequired[Number]


class Evaluations:
    """The folder evals/ of a run. Rollout writes it, or `clew sft`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, version: int, sequences: Sequence[rows.Sequence], summary: dict[str, Any] | None) -> None:
        """Write an evaluation. Its JSON is written last, which marks it as complete.

        `rows` in the JSON is the digest of the file with the sequences. `summary` is None if too many episodes failed,
        so that the evaluation is not complete.
        """
        path = self.folder / f"version-{version:06d}.parquet"
        rows.write_table(path, rows.to_table(sequences))
        if summary is not None:
            facts = {"version": version, **summary, "rows": chain.digest(path.read_bytes())}
            write_bytes(path.with_suffix(".json"), chain.sealed(facts))

    def read(self, version: int) -> dict[str, Any] | None:
        """Return the summary of an evaluation; None until it is complete."""
        path = self.folder / f"version-{version:06d}.json"
        return read_evaluation(path) if path.exists() else None

    def newest(self) -> dict[str, Any] | None:
        path = max(self.folder.glob("version-*.json"), default=None)
        return read_evaluation(path) if path else None

    def read_all(self) -> list[dict[str, Any]]:
        return [read_evaluation(path) for path in sorted(self.folder.glob("version-*.json"))]

    def best(self, versions: Collection[int], changes: Sequence[Mapping[str, Any]]) -> int | None:
        """Return which of these versions has the best evaluation; None if none of them is evaluated.

        The best has the highest pass@1. Ties are broken by the highest reward, then the lowest loss, then the earliest
        version, whose weights have moved least from the first model. See `comparable` for those that are compared.

        Args:
            changes: The run's changes of its configuration, from run.json.
        """
        evaluated = comparable([each for each in self.read_all() if each["version"] in versions], changes)
        scores = [  # None: all of its episodes failed
            (
                *(-math.inf if each.get(name) is None else each[name] for name in ("pass@1", "reward")),
                -each.get("loss", 0.0),
                -each["version"],
            )
            for each in evaluated
        ]
        return -max(scores)[-1] if scores else None


def comparable(evals: list[dict[str, Any]], changes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest evaluations that measure the same: those between two changes of what they measure.

    Args:
        changes: The run's changes of its configuration, from run.json.
    """
    changed = [each["step"] for each in changes if any(map(MEASURES.match, each["fields"]))]
    spans = [sum(step < each["version"] for step in changed) for each in evals]
    return [each for each, span in zip(evals, spans, strict=True) if span == max(spans)]


def read_evaluation(path: Path) -> dict[str, Any]:
    """Read an evaluation's JSON. Raises RecordError if it is something else."""
    found = read_json(path, Evaluated)
    check(path, {name: value for name, value in found.items() if name.startswith("pass@")}, dict[str, Number | None])
    return found
