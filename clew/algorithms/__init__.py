"""Published algorithms, one page each, and the options that they stand for. Read `grpo.py` first, then `ppo.py`.

A page is a module with OPTIONS, `advantages` and `loss`. If a paper reuses a part of an earlier one, its page imports
that part from the earlier paper's page. A user's own algorithm is a module of the same form, but may lack some of the
three.

This package is pure: tensors and arrays in, tensors and arrays out. Pages are loaded when they are needed, so that
importing the package imports neither NumPy nor torch. The pages themselves never import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal, get_args

from clew import dotted
from clew.errors import ConfigError

Preset = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "ppo", "gspo", "cispo"]
PRESETS: tuple[str, ...] = get_args(Preset)
"""Published algorithms. Each has a page of this name."""

ADVANTAGES = {
    "group": "grpo.advantages",
    "group_mean_batch_std": "grpo.advantages_batch_std",
    "batch": "reinforce_pp.advantages",
    "mean": "dr_grpo.advantages",
    "leave_one_out": "rloo.advantages",
    "leave_one_out_std": "rloo.advantages_std",
    "none": "reward_statistics.advantages",
    "gae": "ppo.advantages",
}
"""Built-in advantages, and the page and function that define each. Anything else is the dotted path of a function."""

WITHIN_GROUP = ("group", "group_mean_batch_std", "mean", "leave_one_out", "leave_one_out_std")
"""Advantages that compare the episodes of a group, and so need at least two of them."""

WITH_CRITIC = ("gae",)
"""Built-in advantages that take a critic's values."""

LOSSES = {"clip": "ppo", "cispo": "cispo"}
"""Built-in losses, and the page that defines each. Anything else is the dotted path of a function."""

FORMULAS = 5
"""Version of Clew's own formulas, so that a replay knows which ones a record was made with.

It is raised when a formula gives other numbers than before from the same inputs, if only by rounding. 2: k3 is computed
with expm1, and clip_share also counts the tokens that CISPO and the dual clip hold. 3: logits of half precision reach
the softmax without a float32 copy, so CUDA rounds differently. 4: on the CPU, transformers' own code replaces Clew's
rotary embedding, RMSNorm and attention of short rows. 5: equal rewards have advantages of exactly 0.
"""


def page(name: str) -> Any:
    """Import and return the page with this name."""
    return import_module(f"{__name__}.{name}")


def built_in_advantages(name: str) -> Any:
    """Return the function of ADVANTAGES with this name."""
    of_page, _, function = ADVANTAGES[name].partition(".")
    return getattr(page(of_page), function)


def preset_options(preset: str, *, max_new_tokens: int = 256) -> dict[str, Any]:
    """Return the options that a preset sets, by their dotted names. All other fields keep their defaults.

    Args:
        preset: The name of a published algorithm, or the dotted path of a user's page. That page's functions become
            algorithm.advantages and algorithm.loss, unless its OPTIONS name others.
        max_new_tokens: The limit of the sampling, on which some options depend.

    Raises:
        ConfigError: The user's page cannot be loaded, or has none of OPTIONS, advantages and loss.
    """
    if preset in PRESETS:
        options = page(preset).OPTIONS
    else:
        own = dotted.load_module(preset, "algorithm.preset")
        functions = {name: f"{preset}.{name}" for name in ("advantages", "loss") if hasattr(own, name)}
        options = getattr(own, "OPTIONS", {})
        if not isinstance(options, Mapping) or not (functions or options):
            raise ConfigError(
                f"algorithm.preset={preset}: expected a module with any of OPTIONS (a dict), advantages and loss "
                f"(functions); {own.__file__} has none."
            )
        options = functions | dict(options)
    return {  # an option that depends on max_new_tokens is a function of it
        name if "." in name else f"algorithm.{name}": value(max_new_tokens) if callable(value) else value
        for name, value in options.items()
    }
