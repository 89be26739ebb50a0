"""The setting launch.devices: how many devices generate and how many train, in AReaL's notation. Imports no torch.

::

    sglang.d4p1t2               inference alone: 4 servers of 2 devices each
    d4p1t1                      training alone: 4 ranks, from recorded data or with servers that are already running
    sglang.d4p1t1+d4p1t1        both, on 8 devices
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clew.config_fields import ENGINES

TRAINING = "fsdp"
"""Name that may stand before the sizes of training."""

DIMENSIONS = {"p": "pipeline", "c": "context", "e": "expert"}
"""Kinds of parallelism that AReaL's notation has and Clew does not support."""

_PART = re.compile(r"(?:(?P<name>[a-z]+)[.:])?(?P<sizes>(?:[a-z][0-9]+)+)")


@dataclass(frozen=True, kw_only=True)
class Part:
    """The devices of inference, or of training."""

    name: str
    """Name of the engine, or fsdp for training."""
    d: int
    """Number of servers, or of groups of ranks, that each hold the whole model."""
    t: int
    """Number of devices that share the model (tensor parallelism)."""

    @property
    def size(self) -> int:
        return self.d * self.t


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Parsed value of launch.devices. A side that it does not name is None."""

    inference: Part | None
    training: Part | None


def parse_devices(text: str) -> Devices:
    """Parse the text of launch.devices.

    Raises:
        ValueError: The text is malformed, or asks for a kind of parallelism that Clew does not have.
    """
    parts = [_part(text, part) for part in text.split("+")]
    inference = [part for part in parts if part.name != TRAINING]
    training = [part for part in parts if part.name == TRAINING]
    if len(inference) > 1 or len(training) > 1:
        raise ValueError(f"launch.devices is {text!r}: it has two parts of one kind. {_EXAMPLES}")
    return Devices(inference=inference[0] if inference else None, training=training[0] if training else None)


_EXAMPLES = "Expected, for example, sglang.d4t1 (inference alone), d4t1 (training alone) or sglang.d4t1+d4t1"


def _part(text: str, part: str) -> Part:
    found = _PART.fullmatch(part.strip())
    if found is None:
        raise ValueError(f"Cannot read {part!r} in launch.devices={text!r}. {_EXAMPLES}")
    name = found["name"] or TRAINING
    if name not in (*ENGINES, TRAINING):
        raise ValueError(
            f"launch.devices names {name!r} in {text!r}. Clew generates with {', '.join(ENGINES)} and trains with "
            f"{TRAINING}"
        )
    sizes = re.findall(r"([a-z])([0-9]+)", found["sizes"])
    if twice := [kind for kind, _ in sizes if [kind for kind, _ in sizes].count(kind) > 1]:
        raise ValueError(f"launch.devices is {text!r}: {part!r} has {twice[0]} twice. {_EXAMPLES}")
    numbers = {kind: int(number) for kind, number in sizes}
    for kind, number in numbers.items():
        if kind in DIMENSIONS and number > 1:
            raise ValueError(
                f"launch.devices asks for {kind}{number} in {part!r}: Clew has no {DIMENSIONS[kind]} parallelism. Use "
                f"{kind}1, and d (copies) or t (tensor parallelism)"
            )
        if kind not in ("d", "t", *DIMENSIONS):
            raise ValueError(f"launch.devices has {kind}{number} in {part!r}, but sizes are d, t and p. {_EXAMPLES}")
        if number < 1:
            raise ValueError(f"launch.devices has {kind}0 in {part!r}: each size is at least 1")
    return Part(name=name, d=numbers.get("d", 1), t=numbers.get("t", 1))


def gpus(environment: Mapping[str, str] = os.environ, nodes: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that processes may use, as CUDA_VISIBLE_DEVICES names them; empty on a machine without any."""
    # In a container, CUDA counts its GPUs from 0, while the names of the device nodes keep the machine's numbers.
    present = [str(number) for number, _ in enumerate(nodes.glob("nvidia[0-9]*"))]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]


def assigned_gpus(devices: Devices, available: list[str]) -> dict[str, str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each server ("server", "server-1", ...) and for "trainer".

    Return {} if no GPU is available: each device is then a process on the CPU.

    Raises:
        ValueError: The devices need more GPUs than there are.
    """
    parts = [part for part in (devices.inference, devices.training) if part is not None]
    wanted = sum(part.size for part in parts)
    if not available:
        return {}
    if wanted > len(available):
        named = " and ".join(f"{part.size} for {'training' if part.name == TRAINING else part.name}" for part in parts)
        raise ValueError(f"launch.devices needs {wanted} devices ({named}), and there are {len(available)}")
    given: dict[str, str] = {}
    if devices.inference is not None:
        t = devices.inference.t
        for number, name in enumerate(server_names(devices)):
            given[name] = ",".join(available[number * t : (number + 1) * t])
    if devices.training is not None:
        given["trainer"] = ",".join(available[wanted - devices.training.size : wanted])
    return given


def server_names(devices: Devices) -> list[str]:
    count = 0 if devices.inference is None else devices.inference.d
    return ["server" if number == 0 else f"server-{number}" for number in range(count)]
