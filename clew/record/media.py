"""media/: images that sequences refer to, one file each, named by their content.

An image that is shown in many turns is therefore stored once.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from clew.errors import RecordError
from clew.reading import RESTORE, read_bytes
from clew.record.files import write_bytes

UNUSED_S = 86400.0
"""Seconds for which an unreferenced image is kept: the episode that shows it may still be running."""

LOOK_S = 3600.0
"""Seconds between two searches for unreferenced images. A search reads the whole record."""

_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"RIFF": "webp"}
"""File name endings, by the first bytes of the file."""

_NAME = re.compile(f"[0-9a-f]{{32}}[.](?:{'|'.join(_KINDS.values())}|bin)")


def is_media_name(name: object) -> bool:
    """Return whether this is a name as `media_name` makes it, which cannot be a path to any other place."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def media_name(content: bytes) -> str:
    """Return the name of an image: 32 hexadecimal digits of its SHA-256, and an ending for its type."""
    kind = next((kind for start, kind in _KINDS.items() if content.startswith(start)), "bin")
    return f"{hashlib.sha256(content).hexdigest()[:32]}.{kind}"


class Media:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._looked_at = -LOOK_S

    def put(self, content: bytes) -> str:
        """Store an image and return its name. Call this before writing anything that refers to the image."""
        name = media_name(content)
        try:
            os.utime(self.folder / name)  # `prune` counts from the last time that an image was shown
        except FileNotFoundError:
            self.folder.mkdir(exist_ok=True)
            write_bytes(self.folder / name, content)
        return name

    def path(self, name: str) -> Path:
        """Return the path of an image. Raises RecordError for a name that `media_name` does not make."""
        if not is_media_name(name):
            raise RecordError(
                f"Cannot look for the image {name!r:.80} in {self.folder}: images are named by 32 hexadecimal digits "
                f"of their hash and an ending such as .png. The record that names it was altered or made by hand."
            )
        return self.folder / name

    def read(self, name: str) -> bytes:
        """Return the content of an image. Raises RecordError if its name is invalid, or its file missing or altered."""
        content = read_bytes(self.path(name))
        if (own := media_name(content)) != name:
            other = f"{len(content)} bytes"
            if (self.folder / own).exists():
                other = f"that of {own}, which it may have changed places with"
            raise RecordError(
                f"{self.path(name)} has other content than when it was written ({other}). {RESTORE.capitalize()}."
            )
        return content

    def prune(self, referred: Callable[[], set[str]]) -> None:
        """Remove images that were not shown to a model for a day and that the record does not refer to.

        Does nothing if it last searched less than `LOOK_S` seconds ago. `referred` returns the names that the record
        refers to, and is called only if there are old images.
        """
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        since = time.time() - UNUSED_S
        old = [path for path in self.folder.glob("[!.]*") if path.stat().st_mtime < since]
        kept = referred() if old else set()
        for path in old:
            if path.name not in kept and path.stat().st_mtime < since:  # `put` may have shown it again meanwhile
                path.unlink(missing_ok=True)
