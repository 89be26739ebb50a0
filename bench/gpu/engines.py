"""Trains the same steps through real vLLM and SGLang servers, where they are installed."""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from clew.record.run import RunDirectory

ARGS = {"vllm": {"gpu-memory-utilization": "0.3"}, "sglang": {"mem-fraction-static": "0.3"}}
"""Options of each server, which shares a GPU with the trainer."""
VERSION = "import importlib.metadata as m, sys; print(m.version(m.packages_distributions()[sys.argv[1]][0]))"


def python_of(backend: str) -> str | None:
    """Return the Python that has a server: CLEW_VLLM_PYTHON or CLEW_SGLANG_PYTHON, or this one; None if none has it."""
    if named := os.environ.get(f"CLEW_{backend.upper()}_PYTHON"):
        return named
    return sys.executable if importlib.util.find_spec(backend) else None


def steps_through(backend: str, python: str, folder: Path, cuda: bool, add: Callable[[str, str], None]) -> bool:
    """Train the run of `folder` with a server beside the trainer, and pass each row of the table to `add`.

    Returns:
        Whether the run ended well.
    """
    version = subprocess.run([python, "-c", VERSION, backend], capture_output=True, text=True).stdout.strip()
    args = ARGS[backend] | ({} if cuda or backend != "vllm" else {"enforce-eager": "true"})
    settings = {
        "trial": backend,
        "launch.mode": "local",
        "launch.colocate": "false",
        "rollout.max_lag": "1",
        "training.deterministic": "false",
        "inference.backend": backend,
        "inference.python": python,
        **{f"inference.args.{name}": value for name, value in args.items()},
    }
    command = [sys.executable, "-m", "clew", "train", str(folder / "run.yaml")]
    began = time.perf_counter()
    ended = subprocess.run(
        [*command, *(f"{name}={value}" for name, value in settings.items())], stderr=subprocess.PIPE, text=True
    )
    seconds, name = time.perf_counter() - began, f"{backend} {version}"
    if ended.returncode:
        print(ended.stderr, file=sys.stderr)
        add(f"steps through {name}", f"failed after {seconds:.0f} s: see above")
        return False
    run = RunDirectory(folder / "runs" / "gpu" / backend)
    steps = [run.steps.read(step) for step in range(run.steps.count())]
    fresh = [each["metrics"]["behaviour_k3"] for each in steps if each["metrics"]["lag_max"] == 0]
    updates = [sum(t for part, t in each["timings"].items() if part.startswith("publish/")) for each in steps[1:]]
    tokens = sum(each["metrics"]["tokens_trained"] for each in steps[1:])
    add(f"{len(steps)} GRPO steps through {name}, with its start", f"{seconds:.1f} s")
    add(
        f"{backend}: after the first step",
        f"{tokens / (steps[-1]['committed_at'] - steps[0]['committed_at']):,.0f} tokens/s",
    )
    add(f"{backend}: an update of its weights, and the checks", f"{1000 * statistics.median(updates):.0f} ms")
    add(f"{backend}: mismatch (k3) of fresh tokens, at most", f"{max(fresh, default=float('nan')):.1e}")
    return True
