"""An algorithm of your own: a page like those in clew/algorithms. docs/algorithms.md says what it may have.

Advantages: REINFORCE++ with a baseline (arXiv 2501.03262): against the group's mean, over the whole batch's deviation.
Loss: a tapered REINFORCE, after TOPR (arXiv 2503.14286): what was good is imitated; what was bad is avoided the less,
the less likely it is already.
"""

from collections import defaultdict

import numpy as np
import torch

OPTIONS = {"loss_mean": "token"}  # fields of the configuration's section `algorithm`; what the user sets there wins


def advantages(sequences):
    groups = defaultdict(list)
    for sequence in sequences:
        groups[sequence.group_id].append(sequence.reward)
    centred = np.array([sequence.reward - np.mean(groups[sequence.group_id]) for sequence in sequences])
    return centred / (centred.std() + 1e-6)


def loss(logprobs_N, behaviour_N, advantages_N):
    ratio_N = torch.exp(logprobs_N - behaviour_N).detach()
    weight_N = torch.where(advantages_N > 0, torch.ones_like(ratio_N), ratio_N.clamp(max=1))
    return -weight_N * advantages_N * logprobs_N, {"tapered": weight_N < 1}
