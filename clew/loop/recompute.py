"""Advantages and loss of a step, computed again from its recorded inputs alone: without model and checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from clew.config import Algorithm
from clew.loop.differences import Difference
from clew.record.rows import Sequence
from clew.record.steps import Stages
from clew.training.custom import source_of


def suspect_user_code(
    found: Difference,
    batch: list[Sequence],
    recorded: Stages,
    summary: dict[str, Any],
    algorithm: Algorithm,
    *,
    checked: bool,
) -> Difference:
    """Return the difference `found`, in advantages or loss, and add how the user's own function may have caused it.

    Args:
        checked: True if all inputs agree, and torch's random numbers were seeded as they were in the recorded step.
    """
    field = f"algorithm.{found.stage}"
    now, then = source_of(algorithm, found.stage), summary.get("code", {}).get(field)
    if now is None:  # it is Clew's own
        return found
    compute, chance = COMPUTED[found.stage], ""
    if then == now:
        chance = _chance(lambda: compute(batch, recorded, summary["plan"], algorithm), seeded=checked)
    if chance:
        why = f"{field} {chance}"
    elif then is not None and then != now:
        why = f"the file of {field} was changed since"
    else:
        altered = "the record of it was altered" if checked else "it or its inputs were altered on record"
        others = "what is not on record" if found.stage == "advantages" else "which sequences share a micro-batch"
        file = f"the file of {field} is the same: " if then else ""
        calls = f"what {'the file calls' if then else f'{field} names'} was changed since"
        why = f"{file}{altered}, or {calls}, or it depends on {others}"
    if checked:
        why = f"its inputs agree; {why}"
    return replace(found, more=f"{found.more}; {why}" if found.more else why)


def _chance(compute: Callable[[], dict[str, np.ndarray]], *, seeded: bool) -> str:
    """Return why a computation gives another result each time; empty if it does not.

    Args:
        seeded: True if torch's random numbers were seeded in the comparison, so that they cannot be the reason.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    drawn: list[str] = []

    class Drawn(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if torch.Tag.nondeterministic_seeded in func.tags:
                drawn.append(str(func))
            return func(*args, **(kwargs or {}))

    with Drawn():
        first, second = compute(), compute()
    if all(np.array_equal(first[name], second[name], equal_nan=True) for name in first) or (drawn and seeded):
        return ""
    if drawn:
        return (
            f"draws random numbers ({', '.join(dict.fromkeys(drawn))}), which have their seed where the whole step is "
            f"trained: leave --stage away"
        )
    return (
        "is not deterministic: computed twice here, it gave two results, and no operation of torch draws random "
        "numbers in it"
    )


def _advantages(
    batch: list[Sequence], recorded: Stages, plan: list[list[list[int]]], algorithm: Algorithm
) -> dict[str, np.ndarray]:
    from clew.training.advantages import advantages_function

    reference, values, bootstrap = (
        [recorded.arrays[name][row.id] for row in batch] if name in recorded.arrays else None
        for name in ("reference_logprobs", "values", "bootstrap_values")
    )
    found = advantages_function(algorithm)(batch, reference, values, bootstrap)
    return dict(zip([row.id for row in batch], found.advantages, strict=True))


def _loss(
    batch: list[Sequence], recorded: Stages, plan: list[list[list[int]]], algorithm: Algorithm
) -> dict[str, np.ndarray]:
    """Return the loss of each token by sequence ID, computed from the recorded logprobs and advantages."""
    import torch

    from clew.algorithms.losses import TrainedTokens
    from clew.training.batching import loss_weights
    from clew.training.loss_function import loss_function

    mask_S = np.concatenate([row.loss_mask for row in batch])
    rows_S = np.repeat(np.arange(len(batch)), [len(row.input_ids) for row in batch])

    def tensor(arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)[mask_S])

    def stage(name: str) -> torch.Tensor | None:
        return tensor([recorded.arrays[name][row.id] for row in batch]) if name in recorded.arrays else None

    inputs: dict[str, Any] = {
        "logprobs_N": stage("logprobs"),
        "proximal_N": stage("proximal_logprobs"),
        "behaviour_N": tensor([row.logprobs for row in batch]),
        "advantages_N": stage("advantages"),
        "reference_N": stage("reference_logprobs"),
        "entropies_N": stage("entropies"),
        "rows_N": torch.from_numpy(rows_S[mask_S]),
    }
    loss_S = np.zeros(len(mask_S), np.float32)
    loss_S[mask_S] = loss_function(algorithm)(TrainedTokens(**inputs)).per_token_N.numpy()
    if (weights := loss_weights(batch, plan, algorithm)) is not None:
        loss_S *= weights[rows_S]
    pieces = np.split(loss_S, np.cumsum([len(row.input_ids) for row in batch])[:-1])
    return dict(zip([row.id for row in batch], pieces, strict=True))


COMPUTED = {"advantages": _advantages, "loss": _loss}
"""Function that computes a stage again: (batch, recorded stages, plan, algorithm) -> values by sequence ID."""
