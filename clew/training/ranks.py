"""The trainer's processes: which of them this one is, and how they communicate.

Parameters and gradients travel in FSDP2's collectives (`clew.training.sharding`). This module does the rest: sums,
small messages, and waiting for rank 0, which alone talks to everything outside the trainer.
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
from torch.distributed.elastic.control_plane import worker_main

from clew.errors import Interrupted, LaunchError
from clew.waits import waiting

T = TypeVar("T")

PATIENCE = datetime.timedelta(minutes=30)
"""Time after which a collective counts as failed, because a rank was lost."""

LOOK_INTERVAL = datetime.timedelta(seconds=1)
"""Interval at which a wait for rank 0 checks whether this process should end."""


def rank_here() -> int:
    """Return this process's rank, as torchrun and `clew.launch.ranks` set it in the environment; 0 if it is not set."""
    return int(os.environ.get("RANK", "0"))


def process_here() -> str:
    """Return the name of this rank in status/ and logs/."""
    return f"trainer-{rank}" if (rank := rank_here()) else "trainer"


def _take_gpu(rank: int) -> None:
    """Make this rank's GPU the current one. Raises LaunchError if there is none for it."""
    here, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if here >= count:
        raise LaunchError(
            f"Trainer rank {rank} has no GPU: it needs GPU {here} of this machine, counted from 0, and torch sees "
            f"{count}. Start fewer ranks here (launch.devices, or torchrun's --nproc-per-node). To train on the CPU, "
            f'set CUDA_VISIBLE_DEVICES="".'
        )
    torch.cuda.set_device(here)


_decisions = itertools.count()
"""Number of calls of `Ranks.agree` so far; the same on each rank."""


class Ranks:
    """One of `size` processes that train together. With a single process, nothing here costs anything.

    Every `tp` consecutive ranks form a group, which computes the same rows: each rank computes its part of the model,
    and all get the same results.
    """

    def __init__(self, rank: int = 0, size: int = 1, tp: int = 1) -> None:
        assert size % tp == 0, f"{size} ranks in groups of {tp}"
        self.rank = rank
        self.size = size
        self.tp = tp

    @classmethod
    @contextmanager
    def joined(cls) -> Iterator[Ranks]:
        """Join the ranks that the environment names for as long as the block runs. If it names none, run alone."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            yield cls()
            return
        rank, backend = rank_here(), "gloo"
        if torch.cuda.is_available():
            _take_gpu(rank)
            backend = "cpu:gloo,cuda:nccl"
        # worker_main serves torch's flight recorder to `clew hang`, if the launcher has named a socket.
        with worker_main():  # type: ignore[reportOptionalContextManager]
            with waiting(f"{size} trainer ranks to meet", unblocks="the missing ranks"):
                dist.init_process_group(backend, rank=rank, world_size=size, timeout=PATIENCE)
                dist.barrier()
            yield cls(rank, size)
            # After an error these are skipped, because the other ranks may never reach them.
            dist.barrier()  # if a rank closed its connections while another still read from them, that one would fail
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """True on rank 0, which alone writes shared files and talks to rollout and inference."""
        return self.rank == 0

    @property
    def dp_size(self) -> int:
        """Number of groups that share a batch."""
        return self.size // self.tp

    @property
    def dp_rank(self) -> int:
        """Number of the group that this rank is in."""
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        """Position of this rank within its group."""
        return self.rank % self.tp

    def meet(self) -> None:
        """Wait until every rank has called this."""
        if self.size > 1:
            dist.barrier()

    def add_up(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of an array over the ranks, with the same bits on every rank. Integers wrap around."""
        if self.size == 1:
            return values
        signed = values.view(np.int64) if values.dtype == np.uint64 else values  # gloo does not add uint64
        summed = torch.from_numpy(signed.copy())
        dist.all_reduce(summed)
        return summed.numpy().view(values.dtype)

    def add_up_shares(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of an array over groups. All ranks of a group hold the same array, which counts once."""
        return self.add_up(values if self.tp_rank == 0 else np.zeros_like(values))

    def add_up_named(self, sums: dict[str, float]) -> dict[str, float]:
        """Return each named number, summed over the groups. A name may be missing in some of them."""
        everyone = self.gather(sums)[:: self.tp]
        return {name: sum(each.get(name, 0.0) for each in everyone) for each in everyone for name in each}

    def gather(self, value: T) -> list[T]:
        """Return the value that each rank passes, in the order of ranks. For small objects only."""
        if self.size == 1:
            return [value]
        everyone: list[T | None] = [None] * self.size
        dist.all_gather_object(everyone, value)
        return cast(list[T], everyone)

    def agree(self, what: str, decide: Callable[[], T]) -> T:
        """Return on every rank what `decide` returns on rank 0, which must be JSON data.

        If `decide` raises Interrupted, every rank does. Any other error is raised on rank 0 alone, and the others wait
        until they are ended. Rank 0 may take any amount of time; the others report meanwhile that they wait for `what`.
        """
        if self.size == 1:
            return decide()
        store = dist.distributed_c10d._get_default_store()
        key = f"clew/{next(_decisions)}"
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
                    store.wait([key], LOOK_INTERVAL)
                    break
                except dist.DistStoreError:  # not yet; between two waits Python handles signals
                    continue
        answer = json.loads(store.get(key))
        if "interrupted" in answer:
            raise Interrupted("rank 0 was asked to end")
        return answer["decided"]


ALONE = Ranks()
"""The only rank of a trainer with a single process."""
