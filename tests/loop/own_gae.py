"""A user's page with a critic: PPO's options, and its advantages written down once more."""

import numpy as np

from clew.algorithms import ppo

OPTIONS = {name: value for name, value in ppo.OPTIONS.items() if name != "advantages"}


def advantages(rewards, values, options):
    """Return GAE's advantages, whitened over the step, and the returns."""
    found, returns = [], []
    for rewards_N, values_N in zip(rewards, values, strict=True):
        advantages_N, after, after_value = np.zeros(len(rewards_N)), 0.0, 0.0
        for t in range(len(rewards_N) - 1, -1, -1):
            value = float(values_N[t])
            delta = float(rewards_N[t]) + options.gamma * after_value - value
            after, after_value = delta + options.gamma * options.gae_lambda * after, value
            advantages_N[t] = after
        found.append(advantages_N)
        returns.append(advantages_N + values_N.astype(np.float64))
    all_S = np.concatenate(found)
    centred_S = all_S - all_S.mean()
    deviation = np.sqrt((centred_S**2).sum() / max(1, len(all_S) - 1))
    return np.split(centred_S / (deviation + 1e-6), np.cumsum([len(each) for each in found])[:-1]), returns
