"""inbox/: finished groups that no committed step has consumed yet, and what the trainer has published.

The rollout process writes groups and running.json; the trainer writes version.json and removes groups. Neither ever
waits for a lock: each file is renamed into place, and the order of writing and reading settles the races (see
`Inbox.set_running`).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
from typing_extensions import TypedDict

from clew.errors import RecordError
from clew.reading import Count, read_bytes, read_json
from clew.record import rows
from clew.record.files import write_bytes, write_json

CHECK_BYTES = 4
"""Size in bytes of the checksum at the end of a group's file."""

REMAKE = "remove it, and rollout makes the group again"
"""Remedy that is named in errors about a damaged group."""


class Published(TypedDict):
    """Content of version.json."""

    version: Count


def group_name(number: int) -> str:
    """Return the ID of the n-th group of a run."""
    return f"g{number:06d}"


def group_number(group_id: str) -> int:
    """Return the position of a group in the data order."""
    return int(group_id[1:])


class Inbox:
    """The waiting groups. A file holds the rows of one group in Arrow's stream format, followed by their CRC-32.

    It is not Parquet: a group is read once, seconds after it was written, and Parquet's fixed cost for each file is
    twenty times that of this format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[str, pa.Table] = {}

    def put(self, group_id: str, sequences: Sequence[rows.Sequence]) -> None:
        """Write a finished group. Once this has returned, the group survives whatever happens to the process."""
        sink = pa.BufferOutputStream()
        rows_of_group = rows.to_table(sequences)
        with pa.ipc.new_stream(sink, rows_of_group.schema) as stream:
            stream.write_table(rows_of_group)
        table = sink.getvalue()
        write_bytes(self.path(group_id), b"".join((table, zlib.crc32(table).to_bytes(CHECK_BYTES, "little"))))

    def path(self, group_id: str) -> Path:
        """Return the path of a waiting group. Raises RecordError for an ID that cannot be a file name."""
        if not group_id or "/" in group_id or "\0" in group_id:
            raise RecordError(f"Cannot look for the group {group_id!r:.80} in {self.folder}: it is not a group's ID.")
        return self.folder / f"{group_id}.arrows"

    def read(self, group_id: str) -> pa.Table:
        """Return a waiting group. Raises FileMissing, or RecordError when its file is not what `put` writes."""
        found = self._read(group_id)
        rows.checked(self.path(group_id), found, REMAKE)
        return found

    def _read(self, group_id: str) -> pa.Table:
        """Return a waiting group without checking its rows."""
        path = self.path(group_id)
        content = memoryview(read_bytes(path, REMAKE))
        table, check = content[:-CHECK_BYTES], content[-CHECK_BYTES:]
        if zlib.crc32(table) != int.from_bytes(check, "little") or not table:
            raise rows.unreadable(path, "its checksum does not match", len(content), REMAKE)
        found = rows.sound(path, lambda: pa.ipc.open_stream(pa.py_buffer(table)).read_all(), len(content), REMAKE)
        if "group_id" not in found.column_names:
            raise rows.altered(path, "there is no column 'group_id'", REMAKE)
        if strangers := {*found.column("group_id").to_pylist()} - {group_id}:
            raise rows.altered(path, f"it holds sequences of {min(strangers)}", REMAKE)
        return found

    def names(self) -> set[str]:
        # a waiting trainer polls this, and pathlib takes eight times as long
        names = os.listdir(self.folder) if self.folder.is_dir() else []  # noqa: PTH208
        return {name.removesuffix(".arrows") for name in names if name.startswith("g") and name.endswith(".arrows")}

    def scan(self) -> dict[str, pa.Table]:
        """Return all waiting groups by ID. Each file is read only once. Raises RecordError if one cannot be read."""
        names = self.names()
        self._seen = {name: table for name, table in self._seen.items() if name in names}
        new = {name: self._read(name) for name in sorted(names - self._seen.keys())}
        if new:
            try:  # all rows at once: group by group takes four times as long
                rows.checked(self.folder, rows.concatenated(new.values()), REMAKE)
            except (RecordError, pa.ArrowInvalid):
                new = {name: self.read(name) for name in new}  # raises an error that names the file
        self._seen.update(new)
        return self._seen

    def remove(self, group_ids: Iterable[str]) -> None:
        for group_id in group_ids:
            self.path(group_id).unlink(missing_ok=True)

    def set_running(self, admitted_versions: Mapping[str, int]) -> None:
        """Write which groups are being made, and at which published version each was admitted, for the trainer to read.

        Rollout looks at `published` again after this call, and writes corrected versions if there is a newer one. The
        trainer publishes before it reads this file. So either the trainer sees the group, or the group is admitted at
        the newer version.
        """
        write_json(self.folder / "running.json", dict(admitted_versions))

    def running(self) -> dict[str, int]:
        """Return the groups that are being made, each with the version at which it was admitted."""
        path = self.folder / "running.json"
        running = read_json(path, dict[str, Count]) if path.exists() else {}
        finished = self.names()  # read last: a finished group is here before it leaves running.json
        return {name: version for name, version in running.items() if name not in finished}

    def publish(self, version: int) -> None:
        """Announce that the weights of `version` are loaded everywhere. Rollout admits groups at this version."""
        write_json(self.folder / "version.json", {"version": version})

    def published(self) -> int | None:
        """Return the newest published version; None before the trainer has published one."""
        try:
            return read_json(self.folder / "version.json", Published)["version"]
        except FileNotFoundError:
            return None
