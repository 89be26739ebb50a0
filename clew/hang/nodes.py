"""Examines the nodes of a job at the same time: runs a command for each, which prints the report of that node.

A launcher plugs in here: for each node, it gives a command that runs `clew hang --json -` there, such as one with
`srun --overlap` for Slurm. `over_ssh` does so for ssh.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from clew.errors import ConfigError, LaunchError
from clew.hang.dumps import Merge
from clew.hang.observed import Snapshot

ANSWER_S = 60.0
"""Time limit in seconds for the report of a node."""
AT_ONCE = 64
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
ANSWERS = (0, 1, 3)
"""Exit codes of `clew hang` after a report; an error may also end it with 1."""


def over_ssh(hosts: Sequence[str], arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the command for each host. It runs Clew with the Python at its path here, or else `clew` on the PATH.

    Args:
        arguments: Arguments of `clew hang` on the hosts, such as --job.

    Raises:
        ConfigError: A host would be taken for an option of ssh.
    """
    for host in hosts:
        if host.startswith("-"):
            raise ConfigError(f"Cannot connect to {host!r}: a host does not begin with a dash.")
    python, rest = shlex.quote(sys.executable), shlex.join(["hang", *arguments, "--json", "-"])
    has_clew = f"{python} -P -c 'import clew.cli.main' 2>/dev/null"
    remote = f"if {has_clew}; then exec {python} -P -m clew {rest}; fi; exec clew {rest}"
    return {host: [*SSH, "--", host, remote] for host in hosts}


def gather(commands: Mapping[str, Sequence[str]], limit_s: float = ANSWER_S) -> Snapshot:
    """Return what the nodes report, merged. A node without a report is named in the notes.

    Args:
        commands: Command for each node, by its name.

    Raises:
        LaunchError: No node gave a report.
    """
    merge, failed = Merge(), dict[str, str]()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda name: _answer(commands[name], limit_s), commands)
        for name, (text, error) in zip(commands, answers, strict=True):
            if not error:
                try:
                    merge.add_text(text)
                    continue
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as reason:
                    error = f"its answer is no report: {type(reason).__name__}: {reason}"
            failed[name] = error
    if merge.empty:
        said = "\n".join(f"{name}: {error}" for name, error in failed.items())
        raise LaunchError(f"Cannot look at {', '.join(commands)}: none of them gave a report.\n{said}")
    notes = [f"{name} gave no report: {error}" for name, error in failed.items()]
    snapshot = merge.snapshot(notes)
    return replace(snapshot, absent=(*snapshot.absent, *failed))


def _answer(command: Sequence[str], limit_s: float) -> tuple[str, str]:
    """Return the output of a node's command, and why it failed ("" if it did not)."""
    try:
        ended = subprocess.run(
            list(command), capture_output=True, text=True, timeout=limit_s, errors="replace", stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {limit_s:.0f} s"
    except OSError as error:
        return "", str(error)
    if ended.returncode not in ANSWERS or not ended.stdout:
        return "", " ".join(ended.stderr.split())[-300:] or f"the command ended with code {ended.returncode}"
    return ended.stdout, ""
