"""Decides whether a step must repeat bit for bit: only where machine and packages round as they did then."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from clew.algorithms import FORMULAS
from clew.loop.tolerance import EXACT, TOLERANCES, Tolerance
from clew.record.run import PACKAGES
from clew.record.summary import environment_of
from clew.training.engine import TrainEngine

VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_", "DNNL_", "ONEDNN_", "OMP_", "KMP_", "GOMP_")
"""Prefixes of the environment variables that choose instruction sets and threads for torch, MKL and oneDNN."""


def environment(engine: TrainEngine) -> dict[str, Any]:
    """Return what must be the same for a step to repeat bit for bit."""
    cuda = engine.policy.device.type == "cuda"
    return {
        "ranks": engine.ranks.size,
        "tp": engine.ranks.tp,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if cuda else engine.policy.device.type,
        **({"deterministic": torch.are_deterministic_algorithms_enabled()} if cuda else {}),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "packages": dict(_packages()),
        "rounding": {"formulas": FORMULAS} if cuda else _rounding(),
    }


def repeats(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a step made in one environment should repeat bit for bit in the other.

    It should when both are equal and either run on the CPU or use training.deterministic on CUDA. If it does not repeat
    nevertheless, `clew.record.summary.rounding_doubt` may say why.
    """
    same = {**then, "rounding": None} == {**now, "rounding": None}
    return same and (now["device"] == "cpu" or now["deterministic"])


def how_to_compare(recorded: dict[str, Any], engine: TrainEngine) -> tuple[Tolerance, str]:
    """Return the tolerance for comparing a step, and the reason if it is not bit for bit.

    Equality bit for bit is promised in the same environment, on the CPU or with training.deterministic on CUDA; see
    `repeats` and docs/design.md.
    """
    then, now = environment_of(recorded), environment(engine)
    if repeats(then, now):
        return EXACT, ""
    flat_then, flat_now = ({**each, **each["packages"], "packages": None, "rounding": None} for each in (then, now))
    reasons = [
        f"{name} {flat_then.get(name)} recorded, {here} here"
        for name, here in flat_now.items()
        if flat_then.get(name) != here
    ]
    return TOLERANCES[engine.config.model.dtype], "; ".join(reasons) or f"device {now['device']}"


@cache  # the libraries look at these once, too
def _rounding() -> dict[str, Any]:
    """Return what decides on the CPU how a sum of floats is rounded, besides packages and threads."""
    known = torch.cpu.get_capabilities()
    sets = sorted(name for name, value in known.items() if value is True)
    caches = [f"{name} {known[name]}" for name in ("l1d_cache_size", "l2_cache_size") if name in known]
    set_here = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return {
        "formulas": FORMULAS,
        "processor": " ".join([str(known.get("cpu_name", platform.processor() or platform.machine())), *caches]),
        "instructions": " ".join(sets),
        "variables": " ".join(f"{name}={value}" for name, value in set_here.items()),
    }


@cache  # looking them up takes milliseconds
def _packages() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES if name != "clew"}
