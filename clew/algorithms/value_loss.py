"""The loss of the critic whose values generalized advantage estimation uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(values_N: Tensor, old_N: Tensor, returns_N: Tensor, clip: float | None) -> Tensor:
    """Return half the squared distance of each value to its return, or that of its clipped value if it is larger: [N].

    1/2 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2), as in PPO's code (arXiv 2005.12729).

    Args:
        old_N: Values when the step began.
        clip: Largest change of a value; None: no clip.
    """
    squares_N = (values_N - returns_N) ** 2
    if clip is not None:
        held_N = old_N + (values_N - old_N).clamp(-clip, clip)
        squares_N = squares_N.maximum((held_N - returns_N) ** 2)
    return squares_N / 2
