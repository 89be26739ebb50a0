"""The process group in which weights travel from the trainer to inference servers (weights.via=collective).

::

    rank 0 of the trainer ──► gloo or NCCL ──► workers of vLLM and SGLang

The group is formed as SGLang's /init_weights_update_group forms it: separate from the default group of each process,
which a process need not have. Torch has no public function for that.

vLLM's workers load this file, too, so it imports only torch and other files of Clew.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from clew.record.weight_broadcast import Broadcast

PATIENCE = datetime.timedelta(seconds=30)
"""Time limit for all members to join the group, and for sending each tensor."""

REACHED_IN = datetime.timedelta(seconds=5)
"""Time limit for reaching the meeting point, at which the trainer listens before it asks a server to come."""


class MemberLost(RuntimeError):
    """Raised when a member of a broadcast is lost, or does not join or take part in time."""


@contextmanager
def _as_member_lost() -> Iterator[None]:
    """Raise torch's errors as MemberLost, without their C++ locations and advice."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        message = str(error).strip().partition("\n")[0].rpartition("] ")[2] or str(error)
        if ", keys: " in message:  # of the store at which the members meet
            message = f"not every member joined within {PATIENCE.total_seconds():g} s"
        raise MemberLost(message.partition(". This is typically")[0]) from error


def meeting_point(host: str, port: int, size: int, *, leads: bool = False) -> Any:
    """Return the store at which `size` members meet.

    Rank 0 (`leads`) serves it on all network interfaces, whatever `host` is. Port 0 stands for any free port.
    """
    store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    with _as_member_lost():
        if not leads:  # the store would try for the whole time to reach a meeting that was called off
            socket.create_connection((host, port), REACHED_IN.total_seconds()).close()
        made = store(host, port, size, is_master=leads, wait_for_workers=False, timeout=REACHED_IN)
        made.set_timeout(PATIENCE)
        return made


class Group:
    """The members of a broadcast."""

    def __init__(self, store: Any, name: str, backend: str, rank: int, size: int) -> None:
        """Join the group; return when every member has joined.

        Raises:
            MemberLost: A member did not join in time.
        """
        named: Any = dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]
        with _as_member_lost():
            make: Any = c10d._new_process_group_helper
            made = make(size, rank, [], backend, named, group_name=name, timeout=PATIENCE)
        self._group: dist.ProcessGroup = made[0]
        # destroy_process_group deletes this entry, so it must exist. Usually new_group makes it.
        c10d._world.pg_group_ranks[self._group] = {each: each for each in range(size)}

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor from rank 0 to the others, or receive it into `tensor`. Raises MemberLost if one is lost."""
        options = dist.BroadcastOptions()  # pyright: ignore[reportPrivateImportUsage]
        options.rootRank = options.rootTensor = 0
        with _as_member_lost():
            self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        """Leave the group. Members that still wait for this one get an error."""
        dist.destroy_process_group(self._group)
        del self._group  # gloo closes its connections with the last reference


@contextmanager
def joined(sent: Broadcast, worker: int) -> Iterator[Group]:
    """Be a member of a broadcast's group while the block runs.

    Args:
        sent: The broadcast.
        worker: Number of this process among the workers of its server.
    """
    store = meeting_point(sent.host, sent.port, sent.size)
    group = Group(store, sent.group, sent.backend, sent.rank + worker, sent.size)
    try:
        yield group
    finally:
        group.close()


def receive_buckets(sent: Broadcast, group: Group, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each bucket by name, as soon as they have arrived."""
    for bucket in sent.by_bucket():
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            for name, dtype, shape in zip(sent.names[bucket], sent.dtypes[bucket], sent.shapes[bucket], strict=True)
        }
        for tensor in tensors.values():
            group.broadcast(tensor)
        yield tensors
