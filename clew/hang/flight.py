"""Reads torch's flight recorder in ranks that serve it.

The recorder keeps a process's newest 2,000 collective calls: group, number within the group, operation and sizes.

A rank serves it on a unix socket if it runs within `torch.distributed.elastic.control_plane.worker_main`, and the
variable TORCH_WORKER_SERVER_SOCKET names that socket. The ranks that Clew starts do. A C++ thread answers, even while
Python code is blocked or holds the GIL.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections import defaultdict
from contextlib import suppress

from clew.hang.observed import Call

ANSWER_S = 1.0
"""Time limit in seconds for each answer."""
LONGEST = 16_000_000
"""Maximum number of bytes of an answer that are read."""
KEPT = 200
"""Number of newest calls of each group that are kept."""
RECORDS = ("fr_trace_json", "dump_nccl_trace_json")
"""Names of the handlers that dump the records of all backends, and of NCCL. A torch without NCCL has only the first."""


class _Connection(http.client.HTTPConnection):
    """HTTP on a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(self._path)


def calls_of(path: str) -> tuple[Call, ...]:
    """Return the calls that the server on a unix socket has on record; none if it does not answer."""
    found: dict[tuple[str, int], Call] = {}
    for name in RECORDS if path else ():
        with suppress(OSError, ValueError, http.client.HTTPException):
            connection = _Connection(path)
            try:
                connection.request("POST", f"/handler/{name}?includestacktraces=false")
                answer = connection.getresponse()
                text = answer.read(LONGEST)
            finally:
                connection.close()
            if answer.status == 200:
                found |= {(call.group, call.number): call for call in parse_record(text)}
    return tuple(found.values())


def parse_record(text: str | bytes) -> tuple[Call, ...]:
    """Return the newest calls of each group in a flight record. Raises ValueError if the text is something else.

    Messages between two ranks are left out: gloo does not record them.
    """
    by_group: dict[str, list[Call]] = defaultdict(list)
    try:
        for entry in json.loads(text).get("entries") or ():
            if not entry["is_p2p"]:
                name, described = entry["process_group"]
                call = Call(
                    group="world" if described == "default_pg" else str(name),
                    number=int(entry["collective_seq_id"]),
                    op=str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
                    sizes=json.dumps(entry["input_sizes"]),
                    ended=bool(entry["retired"]),
                )
                by_group[call.group].append(call)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a flight record: {type(error).__name__}: {error}") from error
    return tuple(call for calls in by_group.values() for call in calls[-KEPT:])
