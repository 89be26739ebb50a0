"""Broadcasts the trainer's weights to inference servers (weights.via=collective).

::

    slices of FSDP2 ──► one whole tensor after another ──► rank 0 ──► gloo or NCCL ──► workers of vLLM and SGLang

No rank ever holds the whole model. A server loads the tensors in buckets. What it then holds is compared with the
digests of what was sent, as after an update from disk.
"""

from __future__ import annotations

import logging
import socket
import uuid
from functools import partial

import torch
from torch import Tensor

from clew.config import Config
from clew.config_fields import ENGINES
from clew.errors import EngineError
from clew.inference import weight_group
from clew.inference.sglang_checksums import RunningChecksums
from clew.loop.inference_servers import InferenceServers
from clew.models.tensor_digest import as_array, digest_tensor
from clew.record.run import Server
from clew.record.weight_broadcast import Broadcast
from clew.record.weights import BroadcastDigests
from clew.training.engine import TrainEngine
from clew.training.published_weights import public_tensors
from clew.training.sharding import each_once, full_tensor

log = logging.getLogger("clew.trainer")

BUCKET = 1 << 29
"""Bytes that a server receives before it loads them."""

TRIES = 3
"""Maximum number of broadcasts of a version to a server. A server that received none of them is taken out."""


class WeightSender:
    """The trainer's side of broadcasts."""

    def __init__(self, config: Config, servers: InferenceServers) -> None:
        """Prepare to send to these servers."""
        self.servers = servers
        self._workers = int(config.inference.shares)
        self._public = config.inference.backend != "embedded"
        self._renamed: dict[str, bool] = {}
        """True for tensors that are sent under other names than their own."""
        self._sent: int | None = None
        """Version that was sent last."""
        self._makes_checksums = ENGINES[config.inference.backend].takes_checksums

    def __call__(self, engine: TrainEngine) -> tuple[BroadcastDigests, list[Server]]:
        """Send the engine's weights to every server that is ready, and again to each that the broadcast does not reach.

        A second call at the same version sends them only to the servers that want them. All ranks call this together.

        Returns:
            On rank 0, the digests of what was sent, and the servers that have received it. They serve nothing until
            they are told to load this version.

        Raises:
            EngineError: A server failed, none has received the weights, and no other can serve instead.
        """
        tensors = each_once(engine.policy.model.state_dict(keep_vars=True))
        left = self.servers.ready() if engine.ranks.leads else []
        if self._sent == engine.version:  # the others serve it already
            left = [server for server in left if server.wants_weights]
        self._sent = engine.version
        digests, reached, failed = self._broadcast(engine, tensors, left)
        for _ in range(TRIES - 1):  # one by one: a server that always fails would spoil the broadcast for all
            left = list(failed)
            if not (count := engine.ranks.agree("how often the weights are sent again", partial(len, left))):
                break
            failed = {}
            for number in range(count):
                digests, received, lost = self._broadcast(engine, tensors, left[number : number + 1])
                reached += received
                failed |= lost
        if failed and not reached and not self.servers.serves_without(list(failed)):
            raise EngineError(f"Version {engine.version} reached no server in {TRIES} broadcasts: {_reasons(failed)}")
        for server, reason in failed.items():
            self.servers.take_out(server, "receive the weights", reason)
        return digests, reached

    def _broadcast(
        self, engine: TrainEngine, tensors: dict[str, Tensor], servers: list[Server]
    ) -> tuple[BroadcastDigests, list[Server], dict[Server, str]]:
        """Send the tensors once. Return their digests, the servers that received them, and those that failed."""
        if not servers:
            return self._stream(engine, tensors, None)[0], [], {}
        shells = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors.items()}
        planned = {name: each for shell in shells.items() for name, each in self._sent_as(engine, *shell).items()}
        size = 1 + self._workers * len(servers)
        try:
            meeting = [weight_group.meeting_point("127.0.0.1", 0, size, leads=True)]
            port = meeting[0].port
            store = weight_group.meeting_point("127.0.0.1", port, size)
        except weight_group.MemberLost as lost:
            reason = f"the trainer could not open a port for the broadcast: {lost}"
            log.warning("the broadcast of version %d did not start: %s", engine.version, reason)
            return self._stream(engine, tensors, None)[0], [], dict.fromkeys(servers, reason)
        backend = "nccl" if engine.policy.device.type == "cuda" else "gloo"
        name = f"clew-{engine.version}-{uuid.uuid4().hex[:8]}"
        sent = {
            server: Broadcast(
                version=engine.version,
                host=host_for(server.address),
                port=port,
                group=name,
                backend=backend,
                rank=1 + number * self._workers,
                size=size,
                dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in planned.values()],
                shapes=[list(tensor.shape) for tensor in planned.values()],
                names=list(planned),
                buckets=buckets(planned, BUCKET),
            )
            for number, server in enumerate(servers)
        }
        # Once a server fails, the others need not wait for it at the meeting point, nor the trainer.
        with self.servers.receiving(sent, meeting.clear) as outcome:
            group, error = None, ""
            try:
                group = weight_group.Group(store, name, backend, 0, size)
            except weight_group.MemberLost as lost:
                error = str(lost) if meeting else "a server failed before all had joined"
                meeting.clear()  # a server that joined only now would wait for this process for minutes
            digests, lost_later = self._stream(engine, tensors, group)
            if group is not None:
                group.close()
        if error := error or lost_later:
            left = "each server that is left has received it" if outcome.received else "no server has received it"
            reasons = _reasons(outcome.failed) or left
            log.warning("the broadcast of version %d broke off: %s; %s", engine.version, error, reasons)
        return digests, outcome.received, outcome.failed

    def _stream(
        self, engine: TrainEngine, tensors: dict[str, Tensor], group: weight_group.Group | None
    ) -> tuple[BroadcastDigests, str]:
        """Make each tensor whole, and send it. Return the digests, and why not all were sent; "" if they were."""
        digests: dict[str, str] = {}
        sums, error = RunningChecksums(), ""
        for name, tensor in tensors.items():
            full = full_tensor(tensor)  # a collective: every rank must call it, even if nothing can be sent any more
            if not engine.ranks.leads:
                continue
            for sent_as, part in self._sent_as(engine, name, full).items():
                if group is not None and not error:
                    try:
                        group.broadcast(part)
                    except weight_group.MemberLost as lost:
                        error = str(lost)
                digests[sent_as] = f"{digest_tensor(part, name=sent_as):016x}"
                if self._makes_checksums and part.device.type == "cpu":  # a server on a GPU compares none
                    sums.add(sent_as, part.shape, as_array(part))
        return BroadcastDigests(digests=digests, checksums=sums.by_name()), error

    def _sent_as(self, engine: TrainEngine, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return what is sent for a tensor, by the names that servers know: joined experts are sent one by one."""
        if not self._public or self._renamed.get(name) is False:
            return {name: tensor.contiguous()}
        public = public_tensors(engine, {name: tensor})
        self._renamed[name] = public.keys() != {name}
        return public


def buckets(tensors: dict[str, Tensor], limit: int) -> list[int]:
    """Return how many tensors go into each bucket: as many as fit, or a single larger one."""
    counts: list[int] = []
    room = 0
    for tensor in tensors.values():
        size = tensor.numel() * tensor.element_size()
        if size > room:
            counts.append(0)
            room = limit
        counts[-1] += 1
        room -= size
    return counts


def host_for(address: str) -> str:
    """Return this machine's address as the server at `address`, host:port, reaches it."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
        try:
            probe.connect((host, int(port)))
        except OSError:  # it cannot be reached, perhaps because its name is gone: asking it will show that
            return socket.gethostname()
        return probe.getsockname()[0]


def _reasons(failed: dict[Server, str]) -> str:
    return "; ".join(f"{server}: {reason}" for server, reason in failed.items())
