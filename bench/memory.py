"""Peak memory of each process of a run, as psutil sees it from outside."""

from __future__ import annotations

import threading

import psutil

PERIOD_S = 0.2
COMMANDS = {"train": "supervisor", "learn": "trainer", "rollout": "rollout", "serve": "server"}


def role_of(command: list[str]) -> str | None:
    """Return the role of a process with this command line; None if it is not part of a run."""
    words = [word for word in command if word != "-P"]
    if words[1:3] == ["-m", "clew"]:
        return COMMANDS.get(words[3]) if len(words) > 3 else None
    return "reward worker" if any("reward_worker" in word for word in words) else None


class PeakMemory:
    """Watches a process and its descendants while the block runs."""

    def __init__(self, pid: int) -> None:
        self.mib: dict[str, float] = {}
        """Largest resident set of any process in each role."""
        self._root = psutil.Process(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_S):
            try:
                processes = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in processes:
                try:
                    command, mib = process.cmdline(), process.memory_info().rss / 2**20
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                if role := role_of(command):
                    self.mib[role] = max(self.mib.get(role, 0.0), mib)
