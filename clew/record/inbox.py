"""inbox/: finished groups that no committed step has consumed yet, and what the trainer has published.

Written by the rollout process (groups, running.json) and by the trainer (version.json, removal of groups). Neither
ever waits for a lock: each file is renamed into place, and the order of writing and reading settles the races (see
`Inbox.set_running`).
"""

from __future__ import annotations

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
"""The checksum at the end of a group's file."""

REMAKE = "remove it, and rollout makes the group again"


class Published(TypedDict):
    """Content of version.json."""

    version: Count


def group_name(number: int) -> str:
    """The ID of the n-th group of a run."""
    return f"g{number:06d}"


def group_number(group_id: str) -> int:
    """The place of a group in the data order."""
    return int(group_id[1:])


class Inbox:
    """The waiting groups: each the table of a step, in Arrow's stream format and with the CRC-32 of it behind.

    A group is read once, seconds after it was written, and is a cost a file: Parquet's is twenty times this one's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[str, pa.Table] = {}

    def put(self, group_id: str, sequences: Sequence[rows.Sequence]) -> None:
        """File a finished group. From here on it survives everything that can happen to its process."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.SCHEMA) as stream:
            stream.write_table(rows.to_table(sequences))
        table = sink.getvalue()
        write_bytes(self.path(group_id), b"".join((table, zlib.crc32(table).to_bytes(CHECK_BYTES, "little"))))

    def path(self, group_id: str) -> Path:
        """Return where a waiting group lies. Raises RecordError for an ID that is not a file's name."""
        if not group_id or "/" in group_id or "\0" in group_id:
            raise RecordError(f"Cannot look for the group {group_id!r:.80} in {self.folder}: that is no group's ID.")
        return self.folder / f"{group_id}.arrows"

    def read(self, group_id: str) -> pa.Table:
        """Return a waiting group. Raises FileMissing, or RecordError when its file is not what `put` writes."""
        path = self.path(group_id)
        content = memoryview(read_bytes(path, REMAKE))
        table, check = content[:-CHECK_BYTES], content[-CHECK_BYTES:]
        if zlib.crc32(table) != int.from_bytes(check, "little") or not table:
            raise rows.unreadable(path, "its checksum is another", len(content), REMAKE)
        found = rows.sound(path, lambda: pa.ipc.open_stream(pa.py_buffer(table)).read_all(), len(content), REMAKE)
        if not rows.looks_sound(found):
            rows.checked(path, found, REMAKE)
        if strangers := {*found.column("group_id").to_pylist()} - {group_id}:
            raise rows.altered(path, f"it holds sequences of {min(strangers)}", REMAKE)
        return rows.completed(found)

    def names(self) -> set[str]:
        """The IDs of the groups that lie here."""
        return {path.stem for path in self.folder.glob("g*.arrows")}

    def scan(self) -> dict[str, pa.Table]:
        """All groups that lie here; each file is read once. Raises RecordError when one cannot be read."""
        names = self.names()
        self._seen = {name: table for name, table in self._seen.items() if name in names}
        for name in sorted(names - self._seen.keys()):
            self._seen[name] = self.read(name)
        return self._seen

    def remove(self, group_ids: Iterable[str]) -> None:
        """Drop groups that a committed step names."""
        for group_id in group_ids:
            self.path(group_id).unlink(missing_ok=True)

    def set_running(self, admitted_versions: Mapping[str, int]) -> None:
        """Tell the trainer which groups are being made, and at which published version each was admitted.

        The writer looks at `published` again afterwards, and corrects the versions if it has moved: so either the
        trainer, which publishes before it looks here, sees the group, or the group was admitted at the newer version.
        """
        write_json(self.folder / "running.json", dict(admitted_versions))

    def running(self) -> dict[str, int]:
        """Group ID to the version at which it was admitted, for the groups that are being made."""
        path = self.folder / "running.json"
        running = read_json(path, dict[str, Count]) if path.exists() else {}
        finished = self.names()  # afterwards: a group is filed before it is left out of running.json
        return {name: version for name, version in running.items() if name not in finished}

    def publish(self, version: int) -> None:
        """Say that the weights of `version` are loaded everywhere: rollout admits by it."""
        write_json(self.folder / "version.json", {"version": version})

    def published(self) -> int | None:
        """The newest published version; None before the trainer has published any."""
        try:
            return read_json(self.folder / "version.json", Published)["version"]
        except FileNotFoundError:
            return None
