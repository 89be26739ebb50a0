"""The trainer's processes: which of them this one is, and what they tell one another.

Parameters and gradients travel in FSDP2's collectives (`clew.training.sharding`). Here is what little is left: sums,
a few words, and waiting for rank 0, which alone talks to the rest of the world.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import numpy as np
import torch
from torch import distributed as dist

from clew.errors import Interrupted
from clew.waits import waiting

T = TypeVar("T")

PATIENCE = datetime.timedelta(minutes=30)
"""A collective that takes longer has lost a rank."""

LOOK = datetime.timedelta(seconds=1)
"""How long a wait for rank 0 goes on before it looks whether this process should end."""


def rank_here() -> int:
    """This process's rank, by the environment that torchrun and `clew.launch.ranks` set; 0 where it names none."""
    return int(os.environ.get("RANK", "0"))


class Ranks:
    """One of `size` processes that train together; alone, all of this costs nothing."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._words = 0

    @classmethod
    @contextmanager
    def joined(cls) -> Iterator[Ranks]:
        """Meet the other ranks that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: as torchrun
        and `clew.launch.ranks` set it) for as long as the block runs; alone where it names none."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            yield cls()
            return
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        rank = rank_here()
        with waiting(f"{size} trainer ranks to meet", unblocks="those that are not there yet"):
            dist.init_process_group(backend, rank=rank, world_size=size, timeout=PATIENCE)
            dist.barrier()
        yield cls(rank, size)
        dist.destroy_process_group()  # after an error the others are not there to take part

    @property
    def leads(self) -> bool:
        """Whether this is rank 0: it writes what is written once, and talks to rollout and inference."""
        return self.rank == 0

    def meet(self) -> None:
        """Return when every rank has come here."""
        if self.size > 1:
            dist.barrier()

    def add_up(self, values: np.ndarray) -> np.ndarray:
        """The sum over the ranks of an array; integers wrap around, as digests do. On every rank the same bits."""
        if self.size == 1:
            return values
        signed = values.view(np.int64) if values.dtype == np.uint64 else values
        summed = torch.from_numpy(signed.copy())
        dist.all_reduce(summed)
        return summed.numpy().view(values.dtype)

    def gather(self, said: T) -> list[T]:
        """What each rank says, in their order; small things."""
        if self.size == 1:
            return [said]
        everyone: list[T | None] = [None] * self.size
        dist.all_gather_object(everyone, said)
        return cast(list[T], everyone)

    def agree(self, what: str, decide: Callable[[], T]) -> T:
        """What rank 0 decides, on every rank. It may take as long as it likes: the others wait by name.

        decide: called on rank 0 alone; returns something that JSON can say. Where it raises Interrupted, all do.
        """
        if self.size == 1:
            return decide()
        store = dist.distributed_c10d._get_default_store()
        key = f"clew/{self._words}"
        self._words += 1
        if self.leads:
            try:
                decided = decide()
            except Interrupted:
                store.set(key, json.dumps({"interrupted": True}))
                raise
            store.set(key, json.dumps({"decided": decided}))
            return decided
        with waiting(what, unblocks="rank 0"):
            while True:
                try:
                    store.wait([key], LOOK)
                    break
                except dist.DistStoreError:
                    continue
        said = json.loads(store.get(key))
        if "interrupted" in said:
            raise Interrupted("rank 0 was asked to end")
        return said["decided"]


ALONE = Ranks()
"""The only rank of a trainer of one process."""
