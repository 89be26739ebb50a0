"""Presets: the options that a published algorithm stands for, by name. Importing this module imports nothing else."""

from __future__ import annotations

from typing import Any, Literal

Preset = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "ppo", "gspo", "cispo"]

ADVANTAGES = ("group", "batch", "mean", "leave_one_out", "none", "gae")
"""Built-in advantages. Anything else is the dotted path of a function."""

WITHIN_GROUP = ("group", "mean", "leave_one_out")
"""Advantages that compare the episodes of a group, and so need at least two of them."""

LOSSES = ("clip", "cispo")
"""Built-in losses. Anything else is the dotted path of a function."""

FORMULAS = 2
"""Version of Clew's own formulas, so that a replay knows which ones a record was made with.

It is raised when a formula gives other numbers than before from the same inputs. 2: k3 is computed with expm1, and
clip_share counts what CISPO and the dual clip hold.
"""

LOG_RATIO_LIMIT = 20.0
"""Largest logarithm of a ratio of probabilities that is exponentiated (a ratio of 4.9e8). verl has the same limit."""

_PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300: section 4.2 has the coefficient of the KL term
    "grpo": {"advantages": "group", "loss_mean": "sequence", "kl_coef": 0.04},
    # arXiv 2503.20783: neither the standard deviation nor the length of a response divides
    "dr_grpo": {"advantages": "mean", "loss_mean": "constant"},
    # arXiv 2503.14476; with overlong_penalty and rollout.drop_equal_rewards, below
    "dapo": {"advantages": "group", "clip_low": 0.2, "clip_high": 0.28, "loss_mean": "token"},
    # arXiv 2402.14740: a response is one action, so that the logprobs of its tokens are summed; TRL's coefficient
    "rloo": {
        "advantages": "leave_one_out",
        "loss_mean": "constant",
        "loss_constant": 1,
        "kl_in": "reward",
        "kl_estimator": "k1",
        "kl_coef": 0.05,
    },
    # arXiv 2501.03262, the variant without baseline; the coefficient is only a start
    "reinforce_pp": {
        "advantages": "batch",
        "loss_mean": "token",
        "kl_in": "reward",
        "kl_estimator": "k1",
        "kl_coef": 0.01,
    },
    # arXiv 1707.06347 as InstructGPT has it, arXiv 2203.02155: a critic, the KL penalty on each token
    "ppo": {
        "advantages": "gae",
        "gamma": 1.0,
        "gae_lambda": 0.95,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "value_clip": 0.2,
        "loss_mean": "token",
        "kl_in": "reward",
        "kl_estimator": "k1",
        "kl_coef": 0.02,
    },
    # arXiv 2507.18071: section 5.1 has the clip. Its ratio is of whole sequences, so the importance weight is, too: a
    # sequence whose one token has become unlikely under lag would otherwise keep the mean weight of the others.
    "gspo": {
        "advantages": "group",
        "ratio": "sequence",
        "importance": "sequence_truncate",
        "loss_mean": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    # MiniMax-M1, arXiv 2506.13585: no lower bound; the upper one is that of ScaleRL, arXiv 2510.13786
    "cispo": {"advantages": "group", "loss": "cispo", "loss_mean": "token", "clip_low": 1.0, "clip_high": 4.0},
}


def preset_options(name: str, *, max_new_tokens: int = 256) -> dict[str, Any]:
    """Return the options that a preset sets, by their dotted names. All other fields keep their defaults.

    Args:
        name: The name of the preset.
        max_new_tokens: The limit of the sampling. Dr. GRPO divides by it, and DAPO's penalty begins a fifth before it
            (4096 of 20480).
    """
    options = {f"algorithm.{field}": value for field, value in _PRESETS[name].items()}
    if name == "dr_grpo":
        options["algorithm.loss_constant"] = max_new_tokens
    if name == "dapo":
        options["algorithm.overlong_penalty"] = max(1, max_new_tokens // 5)
        options["rollout.drop_equal_rewards"] = True
    return options


PRESETS = tuple(_PRESETS)
PRESET_FIELDS = frozenset(field for name in PRESETS for field in preset_options(name))
"""Dotted names of the fields that any preset sets."""
