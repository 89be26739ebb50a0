"""Code that a user might write: rewards and workflows, sound and faulty. Named by dotted path in the tests."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np


def exact(completion, data):
    return completion.strip() == str(data["answer"])


def named(completion, data):
    return {"right": np.float32(completion.strip() == str(data["answer"])), "short": np.bool_(len(completion) < 4)}


async def patient(completion, data):
    await asyncio.sleep(data.get("sleep", 0))
    return 1.0


def trl_style(prompts, completions, answer, **columns):
    return [float(c == a and "prompt" in columns) for c, a in zip(completions, answer, strict=True)]


def trl_chat(completions, **columns):
    return [float(completion[0]["content"] == "right") for completion in completions]


def returns_column(completion, data):
    return eval(data["returns"], {"np": np, "nan": float("nan"), "inf": float("inf")})


def raises(completion, data):
    print("about to raise")
    raise ValueError(f"no reward for {completion!r}")


def sleeps(completion, data):
    if data.get("note_pid"):
        with open(data["note_pid"], "w") as file:  # noqa: PTH123
            file.write(str(os.getpid()))
    time.sleep(data.get("sleep", 3600))
    return 1.0


def stuck_in_c(completion, data):
    """Catastrophic backtracking: the regular expression never comes back to the interpreter."""
    if data.get("note_pid"):
        with open(data["note_pid"], "w") as file:  # noqa: PTH123
            file.write(str(os.getpid()))
    return bool(re.match(r"(a*)*$", "a" * 64 + "b"))


def dies(completion, data):
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_a_child(completion, data):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    Path(data["note_pid"]).write_text(str(child.pid))
    os._exit(3)


def forks(completion, data):
    """Run what may fail in a child, which does not end there when it fails."""
    if os.fork() == 0:
        raise RuntimeError("in the child")
    return float(completion)


def leaves(completion, data):
    raise SystemExit(3)


def takes_one(completion):
    return 1.0


class Faulty:
    """Raises on a share of the episodes: those whose number in the order of starting is a multiple of `every`."""

    def __init__(self, every=2):
        self.every = every
        self.started = 0

    async def run_episode(self, engine, data):
        self.started += 1
        if self.started % self.every == 0:
            raise RuntimeError(f"tool {self.started} is broken")
        answer = await engine.generate(engine.tokenizer(data["prompt"]).input_ids)
        return len(answer.output_ids) % 2


class Returns:
    """Gives back what it was told to."""

    def __init__(self, value):
        self.value = value

    async def run_episode(self, engine, data):
        await engine.generate(engine.tokenizer(data["prompt"]).input_ids)
        special = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "0.5", "empty": {}}
        return (special | {"large": {"a": 1e308, "b": 1e308}})[self.value]


class Opens:
    """Reads a file that is not there when it is made."""

    def __init__(self):
        self.prompts = Path("no-such-prompts.txt").read_text()

    async def run_episode(self, engine, data):
        return 1.0


class Leaves:
    """Ends every other episode in a way that is no ordinary exception."""

    def __init__(self, error):
        self.error = error
        self.started = 0

    async def run_episode(self, engine, data):
        number = self.started = self.started + 1
        answer = await engine.generate(engine.tokenizer(data["prompt"]).input_ids)
        if number % 2:
            raise {"exit": SystemExit(3), "cancelled": asyncio.CancelledError()}[self.error]
        return len(answer.output_ids) % 2


async def leaves_later(completion, data):
    await asyncio.sleep(0)
    raise SystemExit(3)


class Silent:
    """Never asks the model."""

    async def run_episode(self, engine, data):
        return 1.0


class Stuck:
    """Never returns."""

    async def run_episode(self, engine, data):
        await asyncio.sleep(3600)


class NotAWorkflow:
    def run(self):
        pass
