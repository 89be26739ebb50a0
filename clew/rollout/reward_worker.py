"""Program of a reward worker: `python -P -c "from clew.rollout.reward_worker import main; main(...)"`.

A job comes as a pickled (completion, data), over a pipe that only this process and its parent hold. The answer is
("returned", reward) or ("failed", message). The parent kills the process when a job takes too long.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection

from clew import dotted
from clew.errors import ConfigError, EpisodeError
from clew.processes import die_with_parent
from clew.rollout.reward_function import RewardFunction


def main(parent_pid: int, fd: int) -> None:
    """Answer jobs until the parent closes the pipe."""
    die_with_parent(parent_pid)
    os.dup2(2, 1)  # what the user's function prints goes to the error stream, beside the log
    pipe = Connection(fd)
    sys.path[:], dotted.trust_rules[:], path, prompt_column = pipe.recv()
    try:
        function = RewardFunction(path, prompt_column)
    except ConfigError as error:
        pipe.send(("failed", str(error)))
        return
    pipe.send(("ready", None))
    own_pid = os.getpid()
    while True:
        try:
            completion, data = pipe.recv()
        except EOFError:
            return
        answer = _answer(function, completion, data)
        if os.getpid() != own_pid:  # the function forked, and this child, which should have ended in it, came back
            os._exit(1)
        pipe.send(answer)


def _answer(function: RewardFunction, completion: str, data: dict) -> tuple[str, object]:
    try:
        return "returned", function(completion, data)
    except EpisodeError as error:
        return "failed", str(error)
    except Exception as error:  # the user's code may raise anything: the parent gets it as a message
        where = "".join(traceback.format_exception(error))
        return "failed", f"reward {function.path} raised {type(error).__name__}: {error}\n{where}"
