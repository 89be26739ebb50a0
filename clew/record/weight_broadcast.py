"""The trainer's announcement of a broadcast of weights. Imports the standard library alone, for vLLM's workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """A broadcast, as one server has to take part in it."""

    version: int
    host: str
    """Host of the trainer, as this server reaches it."""
    port: int
    group: str
    """Name of the group. No two broadcasts have the same."""
    backend: str
    """gloo or nccl."""
    rank: int
    """Rank of this server's first worker in the process group. The trainer has rank 0."""
    size: int
    dtypes: list[str]
    """Number type of each tensor, such as "float32", in the order in which they come."""
    shapes: list[list[int]]
    names: list[str]
    buckets: list[int]
    """Number of tensors in each bucket. A bucket is loaded at once."""

    def shape_by_name(self) -> dict[str, list[int]]:
        return dict(zip(self.names, self.shapes, strict=True))

    def by_bucket(self) -> Iterator[slice]:
        """Yield the positions of the tensors of each bucket."""
        start = 0
        for count in self.buckets:
            yield slice(start, start + count)
            start += count
