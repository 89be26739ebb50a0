"""Program that runs an inference server, and kills it with all its child processes when Clew's process dies.

The kernel can kill the server when Clew dies, but not the processes that the server has started,
such as vLLM's engine. They would live on and keep their memory.

Python runs this file as a script, so it imports only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys

COMMAND_VARIABLE = "CLEW_SERVER_COMMAND"
"""Environment variable with the server's command, as JSON. It is not passed as arguments,
because this process would then be mistaken for the server."""


def _signal_when_parent_dies(number: int, parent: int) -> None:
    """Ask the kernel (on Linux) to send this process a signal when its parent dies.

    If the parent is already dead, send the signal now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG, see prctl(2)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def main(parent: int, command: list[str]) -> int:
    """Run the server until it ends, and return its exit code. If a signal killed the server, die of the same signal.

    Args:
        parent: Pid of Clew's process, which has made this process the leader of a process group.
        command: The server's program and its arguments.
    """

    def kill_group_of_orphans(*_: object) -> None:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill_group_of_orphans)  # while Clew lives, the server itself handles SIGTERM
    _signal_when_parent_dies(signal.SIGTERM, parent)
    watcher, server = os.getpid(), os.fork()
    if not server:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _signal_when_parent_dies(signal.SIGKILL, watcher)
        try:
            os.execvpe(command[0], command, os.environ)
        except OSError as error:
            sys.exit(f"{command[0]}: {error}")
    code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # do not overwrite the server's core file
        if -code != signal.SIGKILL:  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), json.loads(os.environ.pop(COMMAND_VARIABLE))))
