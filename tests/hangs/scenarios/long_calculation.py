"""One process computes a decomposition that takes minutes, in a single call."""

import torch

torch.set_num_threads(1)


def effective_rank(weights: torch.Tensor) -> float:
    values = torch.linalg.svd(weights)[1]
    return float((values / values.sum()).square().sum() ** -1)


print("ready", flush=True)
print(effective_rank(torch.randn(6000, 6000)))
