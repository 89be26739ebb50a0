"""media/: images that sequences refer to, one file each, named by their content: an image that many turns show lies
there once."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from clew.errors import RecordError
from clew.reading import FileMissing, read_bytes
from clew.record.files import write_bytes

UNUSED_S = 86400.0
"""How long an image is kept that nothing refers to: the episode that shows it may still be running."""

LOOK_S = 3600.0
"""Between two looks for such images: one reads all that is on record."""

_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"RIFF": "webp"}
"""Endings, by how such files begin."""


_NAME = re.compile(f"[0-9a-f]{{32}}[.](?:{'|'.join(_KINDS.values())}|bin)")


def is_media_name(name: object) -> bool:
    """Return whether this is a name that `media_name` makes, which is no path to anywhere else."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def media_name(content: bytes) -> str:
    """32 hexadecimal digits of its SHA-256, and what kind of file it is."""
    kind = next((kind for start, kind in _KINDS.items() if content.startswith(start)), "bin")
    return f"{hashlib.sha256(content).hexdigest()[:32]}.{kind}"


class Media:
    """The folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._looked_at = -LOOK_S

    def put(self, content: bytes) -> str:
        """Keep it; returns its name. To be called before anything that refers to it is written."""
        name = media_name(content)
        try:
            os.utime(self.folder / name)
        except FileNotFoundError:
            self.folder.mkdir(exist_ok=True)
            write_bytes(self.folder / name, content)
        return name

    def path(self, name: str) -> Path:
        """Return where an image lies. Raises RecordError for a name that is not the hash of a content."""
        if not is_media_name(name):
            raise RecordError(
                f"Cannot look for the image {name!r:.80} in {self.folder}: images are named by 32 hexadecimal digits "
                f"of their hash and an ending such as .png. The record that names it was altered or made by hand."
            )
        return self.folder / name

    def read(self, name: str) -> bytes:
        """Return the content of an image. Raises RecordError: no such name, missing, altered."""
        try:
            content = read_bytes(self.path(name))
        except FileMissing:
            raise RecordError(
                f"{self.path(name)} is missing, which a sequence shows. Restore it from a copy of the run directory."
            ) from None
        if (own := media_name(content)) != name:
            other = f"that of {own}, which it may have changed places with" if (self.folder / own).exists() else ""
            raise RecordError(
                f"{self.path(name)} has other content than when it was written "
                f"({other or f'{len(content)} bytes'}). Restore it from a copy of the run directory."
            )
        return content

    def prune(self, referred: Callable[[], set[str]]) -> None:
        """Remove what was not shown to a model for a day, and is not among the names that the record refers to.
        Without effect when it was called lately."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        since = time.time() - UNUSED_S
        old = [path for path in self.folder.glob("[!.]*") if path.stat().st_mtime < since]
        kept = referred() if old else set()
        for path in old:
            if path.name not in kept:
                path.unlink(missing_ok=True)
