"""What the processes of `tests.forked` share: nearly all that Clew imports, and the functions that they run."""

from __future__ import annotations

import importlib
import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as under every command of Clew

for _module in (
    "clew.cli",
    "clew.inference.server",
    "clew.rollout.gateway.front",
    "clew.rollout.process",
    "clew.trainer.learn",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "omegaconf",
    "pandas",
    "torch.utils.tensorboard",
    *(f"transformers.models.{family}.modeling_{family}" for family in ("gpt2", "llama", "qwen2", "qwen3")),
):
    importlib.import_module(_module)
