"""The wait-for graph: an edge leads from a process that waits to one that could end its wait."""

from __future__ import annotations

from collections.abc import Mapping


def reachable(start: int, edges: Mapping[int, set[int]]) -> set[int]:
    """Return the nodes that can be reached from `start` along at least one edge."""
    found, waiting = set[int](), list(edges.get(start, ()))
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += edges.get(node, ())
    return found


def sinks(edges: Mapping[int, set[int]]) -> list[set[int]]:
    """Return the sink components: sets of nodes that reach one another and nothing else. There the waiting ends."""
    nodes = set(edges) | {node for targets in edges.values() for node in targets}
    reach = {node: reachable(node, edges) for node in nodes}
    found: list[set[int]] = []
    for node in sorted(nodes):
        component = {node} | {other for other in reach[node] if node in reach[other]}
        if component not in found and reach[node] <= component:
            found.append(component)
    return found
