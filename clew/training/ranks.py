"""The trainer's processes: which of them this one is, and what they tell one another.

Parameters and gradients travel in FSDP2's collectives (`clew.training.sharding`). Here is what little is left: sums,
a few words, and waiting for rank 0, which alone talks to the rest of the world.
"""

from __future__ import annotations

import datetime
import itertools
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


def process_here() -> str:
    """What this rank is called in status/ and logs/."""
    return f"trainer-{rank}" if (rank := rank_here()) else "trainer"


_words = itertools.count()
"""Of `Ranks.agree`: how many there were; the same on each rank."""


class Ranks:
    """One of `size` processes that train together; alone, all of this costs nothing.

    `tp` ranks that follow one another compute the same rows, each its part of the model, and find the same.
    """

    def __init__(self, rank: int = 0, size: int = 1, tp: int = 1) -> None:
        assert size % tp == 0, f"{size} ranks in groups of {tp}"
        self.rank = rank
        self.size = size
        self.tp = tp

    def grouped(self, tp: int) -> Ranks:
        """The same processes, in groups of `tp`."""
        return Ranks(self.rank, self.size, tp)

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
        # After an error the others are not there to take part in these.
        dist.barrier()  # a rank that closes its connections while another still reads from them fails that one
        dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0: it writes what is written once, and talks to rollout and inference."""
        return self.rank == 0

    @property
    def dp_size(self) -> int:
        """How many groups share a batch."""
        return self.size // self.tp

    @property
    def dp_rank(self) -> int:
        """Which of these groups this rank is in."""
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        """Which one of its group this rank is."""
        return self.rank % self.tp

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

    def add_up_shares(self, values: np.ndarray) -> np.ndarray:
        """The same of what all ranks of a group have found, which counts once."""
        return self.add_up(values if self.tp_rank == 0 else np.zeros_like(values))

    def add_up_named(self, sums: dict[str, float]) -> dict[str, float]:
        """The same of numbers by name, of which a group may have others than the next."""
        everyone = self.gather(sums)[:: self.tp]
        return {name: sum(each.get(name, 0.0) for each in everyone) for each in everyone for name in each}

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
        key = f"clew/{next(_words)}"
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
