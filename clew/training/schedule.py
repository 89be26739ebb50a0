"""Learning rate schedules."""

from __future__ import annotations

import math

from clew.config import Training


def learning_rate(update: int, *, total: int, training: Training) -> float:
    """Return the learning rate of optimizer update number `update` (from 0) of `total`.

    The rate rises in equal steps over `warmup_steps` updates and reaches its peak in the one after them. linear and
    cosine then fall, and would reach 0 in the update after the last.
    """
    warmup = training.warmup_steps
    if update < warmup:
        return training.lr * (update + 1) / (warmup + 1)
    done = min(1.0, (update - warmup) / max(1, total - warmup))
    match training.schedule:
        case "constant":
            return training.lr
        case "linear":
            return training.lr * (1 - done)
        case "cosine":
            return training.lr * (1 + math.cos(math.pi * done)) / 2
