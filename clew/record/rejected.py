"""Counts of what a run rejected: failed episodes and groups that were left out, by their reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from clew.printing import counted
from clew.reading import FileMissing
from clew.record import rows
from clew.record.run import RunDirectory
from clew.record.run_warnings import named_kinds

FILTERED = "filtered: "
"""Prefix of the reason in `error` when a filter left a group out."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """Counts of rejected episodes and groups over a whole run."""

    episodes: Counter[str] = field(default_factory=Counter)
    """Failed episodes, by the kind of their error."""
    failed_groups: int = 0
    """Number of groups in which too few episodes got a reward."""
    filtered_groups: Counter[str] = field(default_factory=Counter)
    """Groups that a filter left out, by reason. Unlike in kinds of errors, numbers count: "all 0" is not "all 1"."""
    examples: dict[str, str] = field(default_factory=dict)
    """ID of a group or an episode for each kind of error and each reason."""

    def lines(self) -> list[str]:
        """Return a summary for people, the most common reason first; empty if nothing was rejected."""
        lines = []
        if failed := self.episodes.total():
            lost = f", and {self.failed_groups} whole groups with them" if self.failed_groups else ""
            lines.append(f"{counted(failed, 'episode')} failed{lost}:")
            lines += [f"  {count} times {kind}" for kind, count in self.episodes.most_common(5)]
            if len(self.episodes) > 5:
                lines.append(f"  and {counted(len(self.episodes) - 5, 'other kind')} of error")
        for reason, count in self.filtered_groups.most_common(5):
            lines.append(f"{counted(count, 'group')} left out: {reason}")
        if others := self.filtered_groups.most_common()[5:]:
            lines.append(f"{sum(count for _, count in others)} groups left out for {len(others)} other reasons")
        return lines


def count_rejected(run: RunDirectory) -> Rejected:
    """Read rejected/ and count its episodes and groups. Raises RecordError for a file that Clew did not write."""
    every, filtered, groups = list[tuple[str, str]](), Counter[str](), 0
    examples: dict[str, str] = {}
    for path in sorted(run.rejected.glob("g*.parquet")):
        try:
            table = rows.read_table(path)
        except FileMissing:  # a rollout process that starts removes failed episodes of lost groups
            continue
        if "error" not in table.column_names:
            raise rows.altered(path, "there is no column 'error'")
        errors = [str(error) for error in table.column("error").to_pylist()]
        failed = [
            error
            for error, reason in zip(errors, table.column("finish_reason").to_pylist(), strict=True)
            if reason == "error"
        ]
        every += [(error.partition("\n")[0], path.stem) for error in failed]
        if "." not in path.stem:
            reason = next((error for error in errors if error.startswith(FILTERED)), None)
            groups += reason is None
            if reason is not None:
                reason = reason.removeprefix(FILTERED).partition("\n")[0]
                filtered[reason] += 1
                examples.setdefault(reason, path.stem)
    kinds = named_kinds([error for error, _ in every])
    for kind, (_, group) in zip(kinds, every, strict=True):
        examples.setdefault(kind, group)
    return Rejected(episodes=Counter(kinds), failed_groups=groups, filtered_groups=filtered, examples=examples)
