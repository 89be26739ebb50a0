"""Compares the calls of collectives that ranks have on record, in torch's flight recorder or in NCCL's RAS.

A stack shows a line, but neither how many times a rank has called it nor which calls came before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from clew.hang.equal_stacks import by_value
from clew.hang.observed import Call
from clew.hang.verdict import Actor

RAS = "Collectives launched, as NCCL's RAS counts them, in communicator"


def first_different_call(ranks: Sequence[Actor]) -> tuple[list[Actor], str] | None:
    """Return the ranks whose call was the first to differ from the majority's, and a sentence that names the call.

    Ranks may run on for long after that call: gloo pairs calls only by their number and size in bytes.

    Returns:
        None if the calls on record are the same. All ranks if there is no majority.
    """
    for group in _pending_groups(ranks):
        calls = {a.pid: {c.number: c for c in a.process.calls if c.group == group} for a in ranks}
        for number in sorted(set.intersection(*(set(each) for each in calls.values()))):
            operations = {pid: _operation(each[number]) for pid, each in calls.items()}
            if odd := unlike_most(ranks, operations):
                return odd, f"They parted at call {number} of group {group}: {_by_value(ranks, operations)}."
    return None


def different_counts(ranks: Sequence[Actor]) -> tuple[list[Actor], str] | None:
    """Return the ranks whose counts of launched collectives differ from the majority's, and a sentence.

    The counts are those of an NCCL communicator. If several communicators differ, return the ranks that are behind.
    """
    unequal = _unequal(ranks)
    if len(unequal) != 1:
        return behind(ranks)
    members, counts, text = unequal[0]
    return unlike_most(members, counts), f"{text}."


def unlike_most(ranks: Sequence[Actor], values: Mapping[int, object]) -> list[Actor]:
    """Return the ranks whose value, by pid, differs from that of the majority; all if there is no majority."""
    common, count = Counter(values.values()).most_common(1)[0]
    return [a for a in ranks if values[a.pid] != common] if count > len(ranks) / 2 else list(ranks)


def behind(ranks: Sequence[Actor]) -> tuple[list[Actor], str] | None:
    """Return the ranks that launched fewer collectives in an NCCL communicator, and a sentence; None if no rank did.

    A rank that has launched more of one collective and fewer of another is not behind: it took another path. A rank
    that is ahead in another communicator waits there, so it is not blamed.
    """
    late, waiting, words = list[Actor](), set[int](), list[str]()
    for members, counts, text in _unequal(ranks):
        furthest = max(counts.values(), key=lambda each: sum(number for _, number in each))
        slower = [a for a in members if counts[a.pid] != furthest]
        if any(n > dict(furthest).get(op, 0) for a in slower for op, n in counts[a.pid]):
            return None
        late += slower
        waiting |= {a.pid for a in members if a not in slower}
        words.append(f"{text}.")
    blamed = [a for a in ranks if a in late and a.pid not in waiting]
    return (blamed, " ".join(words)) if blamed else None


def _unequal(ranks: Sequence[Actor]) -> list[tuple[list[Actor], dict[int, tuple[tuple[str, int], ...]], str]]:
    """Return the NCCL communicators whose ranks were all seen and whose counts differ.

    Returns:
        For each communicator: its ranks, their counts by pid, and both as text.
    """
    every = [(a, each) for a in ranks for each in a.process.launched]
    found = []
    for name in dict.fromkeys(each.communicator for _, each in every):
        inside = [(a, each) for a, each in every if each.communicator == name]
        counts = {a.pid: each.counts for a, each in inside}
        if len(inside) == inside[0][1].size and len(set(counts.values())) > 1:
            members = [a for a, _ in inside]
            texts = {pid: ", ".join(f"{n} {op}" for op, n in each if n) or "none" for pid, each in counts.items()}
            found.append((members, counts, f"{RAS} {name}: {_by_value(members, texts)}"))
    return found


def record_lines(ranks: Sequence[Actor]) -> tuple[str, ...]:
    """Return a line for each group with a pending call, and for each NCCL communicator whose counts differ."""
    lines = []
    for group in _pending_groups(ranks):
        newest = {a.pid: next((c for c in reversed(a.process.calls) if c.group == group), None) for a in ranks}
        calls = {pid: _newest_call(call) for pid, call in newest.items()}
        text = _by_value([a for a in ranks if a.process.calls], calls)
        lines.append(f"torch's flight record of group {group}: {text}")
    return (*lines, *(text for _, _, text in _unequal(ranks)))


def _pending_groups(ranks: Sequence[Actor]) -> list[str]:
    return sorted({call.group for a in ranks for call in a.process.calls if not call.ended})


def _newest_call(call: Call | None) -> str:
    if call is None:
        return "no call"
    return f"{'past' if call.ended else 'in'} call {call.number}, {_operation(call)}"


def _operation(call: Call) -> str:
    return f"{call.op} of {sizes}" if (sizes := call.sizes[1:-1]) else call.op


def _by_value(ranks: Sequence[Actor], texts: Mapping[int, str]) -> str:
    """Return the texts of the ranks, by pid, as one. Each text comes once, after the ranks that share it."""
    return by_value((a.rank, texts[a.pid]) for a in ranks if a.rank is not None)
