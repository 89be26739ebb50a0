"""Judges ranks that are all in the same call, or that have not all joined: initialisation, and equal collectives."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from clew.hang import source
from clew.hang.activity import DISTRIBUTED, LOOP_COUNTER, WORKS, Activity
from clew.hang.collective_calls import behind, different_counts, first_different_call, unlike_most
from clew.hang.equal_stacks import ranges
from clew.hang.observed import Frame
from clew.hang.roles import joins_as
from clew.hang.verdict import Actor, Verdict, names, sentences, subject, verdict_about
from clew.hang.waits_for import key_of


def _joined_twice(job: list[Actor], missing: list[int]) -> Verdict | None:
    """Judge processes that are in init_process_group as the same rank of one world: another rank is then absent."""
    joining = defaultdict[tuple[int, int, str], list[Actor]](list)
    for actor in job:
        if actor.activity.kind == "init" and not actor.dead and (joined := joins_as(actor.process)):
            joining[joined].append(actor)
    for (rank, world, address), alike in joining.items():
        # Two jobs may use the same numbers. Only ranks of one job are connected to the same store.
        peers = [set(a.process.peers) for a in alike if a.process.peers]
        if len(alike) < 2 or (peers and not set.intersection(*peers)):
            continue
        joined = {number for number, *same in joining if same == [world, address]}
        lacking = missing if any(a.rank is not None for a in job) else range(world)
        absent = ranges({*lacking} - joined - {a.rank for a in job})
        nobody = f", and nobody as rank {absent}" if absent else ""
        why = f"{' and '.join(a.process.label for a in alike)} each joined as rank {rank}{nobody}."
        return verdict_about("initialisation", alike, why, job, ranks=(rank,))
    return None


def missing_ranks(ranks: list[Actor], missing: list[int], gone: str, job: list[Actor]) -> Verdict | None:
    """Judge a rank that has no process: it never started, it has ended, or its process joined as another rank.

    Args:
        ranks: The ranks that were found.
        missing: Rank numbers that no living process has.
        gone: Words about processes of the job that have ended.
        job: Processes of the job, also ended ones, without launchers and idle helpers.
    """
    if found := _joined_twice(job, missing):
        return found
    dead = [a for a in ranks if a.dead]
    blocked = [a for a in ranks if not a.dead and a.activity.kind in DISTRIBUTED]
    if not missing or not blocked:
        return None
    first, several = blocked[0].activity, len(missing) > 1
    starting = all(a.activity.kind == "init" for a in blocked) and not dead and not gone
    asking = [a for a in job if starting and a.rank is None and a.activity.kind == "http"]
    if asking and not any(a.moving for a in asking):
        why = (
            f"{sentences(blocked)} Rank{'s' * several} {ranges(missing)} {'have' if several else 'has'} not joined. "
            f"{sentences(asking)} Whoever has to join, too, must not first wait for that answer."
        )
        return verdict_about("initialisation", asking, why, job, cause="absent", confidence="medium").at(first.site)
    late = [a for a in job if starting and a.rank is None and a.moving]
    if late:  # one of them may join yet
        moves = "They move" if late[1:] else "It moves"
        why = f"{sentences(late)} {moves}, and the others wait in init_process_group until all ranks have joined."
        return verdict_about("slow", late, why, job, cause="slow")
    ended = "have ended" if several else "has ended"
    what = f"{'never joined' if starting else ended}: there is no such process"
    if unnamed := ", ".join(a.process.label for a in job if a.rank is None and a.activity.kind == "init"):
        seen = "were not seen. They" if several else "was not seen. It"
        what = f"{seen} may be {unnamed}: in init_process_group, too, with an unknown rank"
    why = (
        f"Rank{'s' * several} {ranges(missing)} {what}. {gone}The other ranks wait for "
        f"{'them' if several else 'it'} in {first.op} at {first.site}, and will wait until their timeout."
    )
    pattern, cause = ("initialisation", "absent") if starting else ("dead", "dead")
    return verdict_about(pattern, dead, why, blocked, cause=cause, structural=True, ranks=tuple(missing))


def _other_address(ranks: list[Actor]) -> Verdict | None:
    """Judge ranks that look for the store at another address than rank 0. Ranks that have found it do not count."""
    looking = [actor for actor in ranks if _meeting_point(actor)]
    at = next((_meeting_point(actor) for actor in looking if actor.rank == 0), "")
    odd = [actor for actor in looking if _meeting_point(actor) != at]
    if not at or not odd:
        return None
    said = ", ".join(f"{_meeting_point(actor)} on rank {actor.rank}" for actor in looking[:6])
    why = f"All ranks are in init_process_group, but they look for one another at different addresses: {said}."
    sure = "high" if len(looking) > 2 else "medium"  # of two, either may be right, or both belong to other groups
    return verdict_about("initialisation", odd, why, ranks, structural=True, confidence=sure)


def deviating(ranks: list[Actor], values: Mapping[int, object]) -> tuple[list[Actor], str]:
    """Return the ranks whose value is not the majority's (all ranks if there is none), and the values in words."""
    return unlike_most(ranks, values), ", ".join(f"{values[a.pid]} on rank {a.rank}" for a in ranks[:6])


def _other_groups(ranks: list[Actor]) -> Verdict | None:
    """Judge ranks in new_group whose groups have different names or ranks: torch counts the calls of each rank."""
    named: dict[int, object] = {a.pid: _new_name(a) for a in ranks}
    for_members = all(map(_for_members, ranks))
    if for_members or len(set(named.values())) < 2:  # the names are hashes of the ranks, or one for all groups
        named = {a.pid: _new_ranks(a) for a in ranks}
    if not all(named.values()) or len(set(named.values())) < 2:
        return None
    odd, said = deviating(ranks, named)
    odd = odd if len(odd) < len(ranks) else []
    why = f"All ranks are in new_group, but they make different groups: {said}. "
    if for_members:
        why += "The members of each group have to make it together, so all must make their groups in one order."
    else:
        why += (
            "torch counts the groups that each rank has made, so some ranks have called new_group more often than "
            "others. Every rank has to call it for every group, also for groups that it does not belong to."
        )
    sites = tuple(sorted({a.activity.site for a in ranks}))
    runner_up = "different addresses or ports: the ranks have made groups before"
    return verdict_about("initialisation", odd, why, ranks, sites=sites, runner_up=runner_up)


def _other_value(ranks: list[Actor]) -> Verdict | None:
    """Judge the rank that alone has other values of local variables, on the way to the call that all ranks are in.

    Rank 0 often has values of its own, and so it is not judged. Nor is any rank if several have such values, or if
    there are so few ranks that a value such as `rank % 2` may be one rank's alone.
    """
    found: list[tuple[Actor, str]] = []
    for level in zip(*(a.process.user_frames for a in ranks), strict=False):
        if len(ranks) < 4 or len({(frame.file, frame.line) for frame in level}) > 1:
            break
        for name in sorted(set.intersection(*(set(frame.locals) for frame in level))):
            values = {a.pid: frame.locals[name] for a, frame in zip(ranks, level, strict=True)}
            odd, said = deviating(ranks, values)
            if len(odd) != 1 or odd[0].rank == 0 or source.RANK_WORDS.search(name):
                continue
            if not re.search(r"0x|^(True|False|None)$", values[odd[0].pid]):
                found.append((odd[0], f"{name} differs: {said}"))
    if len({actor.pid for actor, _ in found}) != 1:
        return None
    why = (
        f"All ranks are in {ranks[0].activity.op} and none proceeds. {found[0][1]}. The ranks may look for one "
        f"another under different names."
    )
    return verdict_about("initialisation", [found[0][0]], why, ranks, confidence="medium")


def _values_in_new_group(actor: Actor, name: str) -> list[str]:
    """Return the values of a parameter of the call of new_group that a rank is in."""
    return [frame.locals.get(name, "") for frame in _newest_frames(actor) if frame.name == "new_group"]


def _for_members(actor: Actor) -> bool:
    """Return whether a rank makes a group that only its members have to make."""
    return "True" in _values_in_new_group(actor, "use_local_synchronization")


def _new_ranks(actor: Actor) -> tuple[int, ...]:
    """Return the ranks of the group that a rank is making; () if its frames do not say."""
    texts = _values_in_new_group(actor, "ranks")
    said = next((text for text in texts if re.fullmatch(r"[\[(]\d+(, \d+)*,?[\])]", text)), "")
    return tuple(int(each) for each in re.findall(r"\d+", said))


def _new_name(actor: Actor) -> str:
    """Return the name of the group that a rank is making; "" if its frames do not say."""
    frames = (frame for frame in _newest_frames(actor) if frame.file.endswith("distributed_c10d.py"))
    names = (frame.locals.get("group_name", "").strip("'\"") for frame in frames)
    return next((name for name in names if name and name != "None"), "")


def _newest_frames(actor: Actor) -> Iterator[Frame]:
    """Yield the frames of all looks, the newest first: not every look could read the locals."""
    return (f for look in reversed(actor.process.looks) for thread in look.threads for f in thread.frames)


def _meeting_point(actor: Actor) -> str:
    """Return host:port of the store that a rank wants to reach; "" if its frames do not say."""
    for thread in actor.process.threads:
        for frame in thread.frames:
            host = frame.locals.get("hostname", "").strip("'\"")
            if frame.file.endswith("torch/distributed/rendezvous.py") and host and frame.locals.get("port"):
                return f"{host}:{frame.locals['port']}"
    return ""


def initialisation(ranks: list[Actor]) -> Verdict | None:
    """Judge init_process_group and new_group, which every rank has to call."""
    for kind, words in (("init", "init_process_group"), ("new_group", "new_group")):
        inside = [a for a in ranks if a.activity.kind == kind]
        outside = [a for a in ranks if a.activity.kind != kind and not a.dead]
        if kind == "init" and outside and any(a.process.inside.groups for a in inside):
            continue  # a further group, with an engine for example, which the others need not join
        if inside and outside and not any(a.moving for a in outside):
            made = [_new_ranks(a) for a in inside]
            if kind == "new_group" and all(made):  # blame only members of the new group
                outside = [a for a in outside if a.rank in {rank for ranks in made for rank in ranks}] or outside
            who = "every member of the group" if any(map(_for_members, inside)) else "every rank"
            why = (
                f"{subject(inside, 'is', 'are')} in {words}, which {who} has to call. "
                f"{subject(outside, 'is', 'are')} elsewhere: {outside[0].says}."
            )
            sure = outside[0].activity.kind in DISTRIBUTED
            return verdict_about("initialisation", outside, why, inside, structural=sure)
        if len(inside) == len(ranks) > 1:
            if found := _other_address(inside) or _other_groups(inside) or _other_value(inside):
                return found
            why = f"All ranks are in {words} and none proceeds: they may use different addresses, ports or world sizes."
            return verdict_about("initialisation", [], why, inside, confidence="low")
    return None


def same_everywhere(ranks: list[Actor]) -> Verdict:
    """Judge ranks that are all in one collective: calls of different steps, or a cause below Python.

    Args:
        ranks: All members of its group.
    """
    if found := other_roots(ranks) or other_shapes(ranks):
        return found
    came = f"{_together(ranks)}, but they came there by different calls."
    if parted := first_different_call(ranks):
        odd, why_odd = parted
        return verdict_about("collective mismatch", odd, f"{came} {why_odd}", ranks, structural=True)
    if parted := different_counts(ranks):  # RAS counts what hosts have launched, which may be ahead of a slow network
        odd, why_odd = parted
        late = behind(ranks)
        kinds = {a.activity.cleanup for a in ranks}
        if late and late[0] == odd and kinds <= {"finally", "except", source.WITHOUT_RAISE}:
            raises = odd[0].activity.cleanup != source.WITHOUT_RAISE
            shown = "; it is shown only after the cleanup ends" if raises else ""
            why = (
                f"{came} {why_odd} {subject(odd, 'came to its', 'came to their')} cleanup early. An exception was "
                f"probably the reason{shown}."
            )
            return verdict_about("cleanup deadlock", odd, why, ranks)
        return verdict_about("collective mismatch", odd, f"{came} {why_odd}", ranks, confidence="medium")
    if found := _drifted(ranks) or _other_works(ranks):
        return found
    why = (
        f"{_together(ranks)}, and it does not end. The cause is below "
        "Python (the network, a device that hangs, shapes that differ), or some ranks have called another "
        "collective before, with async_op for example."
    )
    return verdict_about("same collective everywhere", [], why, ranks, confidence="medium")


def _together(ranks: Sequence[Actor]) -> str:
    first = ranks[0].activity
    return f"Ranks {names(ranks)} are in {first.op} of group {first.group}"


def two_threads(ranks: Sequence[Actor]) -> Verdict | None:
    """Judge ranks with two threads in different collectives of one group: chance decides which comes first."""
    crossing: dict[int, list[Activity]] = {}
    for actor in ranks:
        inside = [t for t in actor.threads if t.kind == "collective" and key_of(t) == key_of(actor.activity)]
        if len({(thread.op, thread.site) for thread in inside}) > 1:
            crossing[actor.pid] = inside
    if not crossing:
        return None
    odd = [a for a in ranks if a.pid in crossing]
    for thread in crossing[odd[0].pid]:
        name = _plain(thread.thread)
        gone = [a for a in ranks if name not in {_plain(each.name) for each in a.process.threads}]
        if gone and len(gone) < len(odd):
            why = (
                f"{subject(gone, 'has', 'have')} no thread {name}: it has ended, or was never started. Those of rank "
                f"{names(odd)} wait for it in {thread.op} of group {thread.group} at {thread.site}."
            )
            return verdict_about("dead", gone, why, ranks, cause="dead", sites=(thread.site,), confidence="medium")
    told = ", ".join(f"{thread.thread} in {thread.op} at {thread.site}" for thread in crossing[odd[0].pid])
    why = (
        f"Several threads of rank {names(odd)} are in collectives of group {odd[0].activity.group} at once: {told}. "
        f"Which comes first is left to chance, and the ranks have chosen differently. Give each thread its own group."
    )
    sites = tuple(sorted({each.site for inside in crossing.values() for each in inside}))
    return verdict_about("collective mismatch", odd, why, ranks, cause="threads", confidence="medium", sites=sites)


def _plain(thread: str) -> str:
    """Return a thread's name without its number, such as that of Thread-3 (save)."""
    return re.sub(r"\d+", "", thread)


def other_roots(ranks: list[Actor], elsewhere: Sequence[Actor] = ()) -> Verdict | None:
    """Judge ranks in one collective that name different sources or destinations: nobody sends, or several do.

    Args:
        ranks: The ranks that are in it.
        elsewhere: Ranks that have left it: one that only sends does not wait for the others.
    """
    roots = {a.pid: a.activity.root for a in ranks}
    if len(set(roots.values())) < 2:
        return None
    odd, said = deviating(ranks, roots)
    why = f"{_together(ranks)}, but they name different roots: {said}."
    return verdict_about("collective mismatch", odd, why, [*ranks, *elsewhere], structural=True)


def other_shapes(ranks: list[Actor]) -> Verdict | None:
    """Judge ranks that meet in one operation with tensors of different sizes."""
    sizes = {a.pid: prod(a.activity.shape) for a in ranks}
    if not all(a.activity.shape for a in ranks) or len(set(sizes.values())) == 1:
        return None
    odd, _ = deviating(ranks, sizes)
    said = ", ".join(f"{list(a.activity.shape)} on rank {a.rank}" for a in ranks[:6])
    why = f"{_together(ranks)}, but with tensors of different sizes: {said}."
    return verdict_about("shape mismatch", odd, why, ranks, structural=True)


def _other_works(ranks: list[Actor]) -> Verdict | None:
    """Judge ranks in one call whose lists of unfinished asynchronous operations differ in length."""
    for name, numbers in unequal_counters(ranks, WORKS):
        odd = [a for a in ranks if numbers[a.pid] > min(numbers.values())]
        why = (
            f"{_together(ranks)}, but {name.partition('.')[2]} is {deviating(ranks, numbers)[1]}: rank {names(odd)} "
            "has begun an asynchronous operation that the others have not, so their calls no longer fit together."
        )
        return verdict_about("collective mismatch", odd, why, ranks, confidence="low")
    return None


def _drifted(ranks: list[Actor]) -> Verdict | None:
    """Judge ranks in one collective whose loop counters differ: they are in different calls of it."""
    for name, values in unequal_counters(ranks, LOOP_COUNTER):
        odd, said = deviating(ranks, values)
        rest = "" if odd == ranks else f" {subject(odd, 'has', 'have')} made another number of calls than the others."
        why = f"{_together(ranks)}, but not in the same call of it: {name.rpartition('.')[2]} is {said}.{rest}"
        return verdict_about("collective mismatch", odd, why, ranks, structural=True, confidence="medium")
    return None


def unequal_counters(ranks: list[Actor], names: re.Pattern[str]) -> Iterator[tuple[str, dict[int, int]]]:
    """Yield each counter with such a name that differs between ranks, and its values by pid."""
    for name in sorted(set.intersection(*(set(a.activity.counters) for a in ranks))):
        values = {a.pid: a.activity.counters[name] for a in ranks}
        if names.search(name) and len({*values.values()}) > 1:
            yield name, values
