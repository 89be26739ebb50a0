"""Runs a command of Clew that kills itself (SIGKILL) right before its n-th change to the run directory.

    python -m tests.crash_at N RUN_DIRECTORY train|learn|... CONFIG KEY=VALUE...

No product code takes part: an audit hook of the interpreter counts each rename, removal and opening for writing in
the run directory. With a huge N it prints the number of changes at the end instead.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

LEFT_OUT = ("/status/", "/logs/", "/tensorboard/", "/.learning_curve")


def install(limit: int, folder: Path) -> list[str]:
    """Count the changes; kill this process right before change number `limit` (from 0)."""
    seen: list[str] = []
    prefix = str(folder.resolve())

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event not in ("os.rename", "os.remove", "os.rmdir", "open"):
            return
        if event == "open" and not (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
            return
        name = str(arguments[1] if event == "os.rename" else arguments[0])
        path = os.path.abspath(name)  # noqa: PTH100 - resolve() would raise events of its own
        if not path.startswith(prefix) or any(part in path for part in LEFT_OUT) or path.endswith(".lock"):
            return
        if len(seen) == limit:
            os.write(2, f"killed before {event} {path[len(prefix) + 1 :]}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(f"{event} {path[len(prefix) + 1 :]}")

    sys.addaudithook(hook)
    return seen


if __name__ == "__main__":
    count, folder, *command = sys.argv[1:]
    changes = install(int(count), Path(folder))
    sys.argv = ["clew", *command]
    from clew.cli import main

    try:
        main()
    finally:
        print(f"CHANGES {len(changes)}", flush=True)
