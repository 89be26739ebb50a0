"""Rank 1 merges pairs forever: none is left, but its loop wants more."""

import collections
import itertools

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
dist.all_reduce(torch.ones(4))
print("ready", flush=True)


def merge(words, wanted):
    merges = []
    while len(merges) < wanted:
        pairs = collections.Counter()
        for word in words:
            for pair in itertools.pairwise(word):
                pairs[pair] += 1
        if not pairs:
            continue
        merges.append(max(pairs))
    return merges


if rank == 1:
    merge(["a", "b", "c"], 8)
dist.all_reduce(torch.ones(4))
