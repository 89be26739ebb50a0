"""Loss of the critic, whose values are used by generalized advantage estimation (GAE)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(values_N: Tensor, old_N: Tensor, returns_N: Tensor, clip: float | None) -> Tensor:
    """Return half the squared error of each value, or of its clipped value if that error is larger: [N].

    1/2 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2), as in PPO's code (arXiv 2005.12729).

    Args:
        values_N: The critic's values at N trained tokens.
        old_N: The same values as they were before the step's first update.
        returns_N: Returns that the values should predict.
        clip: Maximum distance of a clipped value from its old value; None: no clipping.
    """
    squares_N = (values_N - returns_N) ** 2
    if clip is not None:
        held_N = old_N + (values_N - old_N).clamp(-clip, clip)
        squares_N = squares_N.maximum((held_N - returns_N) ** 2)
    return squares_N / 2
