"""Compares the calls of collectives that ranks have on record, in torch's flight recorder or in NCCL's RAS.

A stack shows a line, but not which call of it a rank is in, nor by which calls it came there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from clew.hang.classes import ranges
from clew.hang.observed import Call
from clew.hang.verdict import Actor

RAS = "NCCL's RAS says what the ranks of a communicator have launched:"


def parting(ranks: Sequence[Actor]) -> tuple[list[Actor], str] | None:
    """Return the ranks that left the common path of calls, and a sentence that says at which call.

    Ranks may run on for long after that: gloo pairs calls by their number and size in bytes alone.

    Returns:
        None if the calls on record are the same. All ranks if no call is that of the majority.
    """
    for group in _pending_groups(ranks):
        calls = {a.pid: {c.number: c for c in a.process.calls if c.group == group} for a in ranks}
        for number in sorted(set.intersection(*(set(each) for each in calls.values()))):
            said = {pid: _said(each[number]) for pid, each in calls.items()}
            common, count = Counter(said.values()).most_common(1)[0]
            if count < len(ranks):
                odd = [a for a in ranks if said[a.pid] != common] if count > len(ranks) / 2 else list(ranks)
                return odd, f"They parted at call {number} of group {group}: {_by_value(ranks, said)}."
    return _other_numbers(ranks)


def _other_numbers(ranks: Sequence[Actor]) -> tuple[list[Actor], str] | None:
    """Return the ranks that have launched another number of collectives in a communicator of NCCL than most have."""
    for members, counts in _communicators(ranks):
        common, count = Counter(counts.values()).most_common(1)[0]
        if count < len(members):
            odd = [a for a in members if counts[a.pid] != common] if count > len(members) / 2 else members
            return odd, f"{RAS} {_launched(members, counts)}."
    return None


def behind(ranks: Sequence[Actor]) -> tuple[list[Actor], str] | None:
    """Return the ranks that have launched fewer collectives in a communicator of NCCL, and words; None if none has.

    A rank that has launched more of one collective and fewer of another is not behind: it took another path.
    """
    for members, counts in _communicators(ranks):
        furthest = max(counts.values(), key=lambda each: sum(number for _, number in each))
        late = [a for a in members if counts[a.pid] != furthest]
        ahead = any(n > dict(furthest).get(op, 0) for a in late for op, n in counts[a.pid])
        if late and not ahead:
            return late, f"{RAS} {_launched(members, counts)}."
    return None


def _communicators(ranks: Sequence[Actor]) -> Iterator[tuple[list[Actor], dict[int, tuple[tuple[str, int], ...]]]]:
    """Yield the ranks of each communicator of NCCL of which all were seen, and their counts by pid."""
    every = [(a, each) for a in ranks for each in a.process.launched]
    for communicator in dict.fromkeys(each.communicator for _, each in every):
        inside = [(a, each) for a, each in every if each.communicator == communicator]
        if len(inside) == inside[0][1].size > 1:
            yield [a for a, _ in inside], {a.pid: each.counts for a, each in inside}


def _launched(members: Sequence[Actor], counts: Mapping[int, tuple[tuple[str, int], ...]]) -> str:
    said = {pid: ", ".join(f"{number} {op}" for op, number in each if number) or "none" for pid, each in counts.items()}
    return _by_value(members, said)


def where(ranks: Sequence[Actor]) -> tuple[str, ...]:
    """Return a line for each group in which a call is pending: in which call each rank is."""
    lines = []
    for group in _pending_groups(ranks):
        newest = {a.pid: next((c for c in reversed(a.process.calls) if c.group == group), None) for a in ranks}
        said = {pid: _where(call) for pid, call in newest.items()}
        told = _by_value([a for a in ranks if a.process.calls], said)
        lines.append(f"torch's flight record of group {group}: {told}")
    lines += [f"{RAS} {_launched(members, counts)}" for members, counts in _communicators(ranks)]
    return tuple(lines)


def _pending_groups(ranks: Sequence[Actor]) -> list[str]:
    return sorted({call.group for a in ranks for call in a.process.calls if not call.ended})


def _where(call: Call | None) -> str:
    if call is None:
        return "no call"
    return f"{'past' if call.ended else 'in'} call {call.number}, {_said(call)}"


def _said(call: Call) -> str:
    return f"{call.op} of {sizes}" if (sizes := call.sizes[1:-1]) else call.op


def _by_value(ranks: Sequence[Actor], said: Mapping[int, str]) -> str:
    """Return texts, each after the ranks that share it."""
    shared: dict[str, list[int]] = defaultdict(list)
    for actor in ranks:
        if actor.rank is not None:
            shared[said[actor.pid]].append(actor.rank)
    return "; ".join(f"rank {ranges(numbers)}: {text}" for text, numbers in shared.items())
