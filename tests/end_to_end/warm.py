"""Forks that run commands of Clew; see `project.WarmPython`.

Reads {"folder", "arguments", "terminal", "seconds"}, a JSON line each; answers with the exit code (-9: it took too
long).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import clew.cli
import clew.inference.local
import clew.rollout.process
import clew.trainer.learn
from clew.processes import PARENT_VARIABLE, die_with_parent


def run(folder: str, arguments: list[str], terminal: str) -> None:
    """What `python -m clew ARGUMENTS` does, in `folder`; output goes to the file `terminal`."""
    os.setsid()
    os.environ[PARENT_VARIABLE] = str(os.getppid())
    os.chdir(folder)
    output = os.open(terminal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["clew", *arguments]
    code = 0
    try:
        clew.cli.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(child: int, seconds: float) -> int:
    """Its exit code; it is killed when it takes longer."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    die_with_parent()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            run(job["folder"], job["arguments"], job["terminal"])
        print(wait(child, job["seconds"]), flush=True)
