"""Rank 1 filters every sample of an endless generator."""

import itertools

import torch
import torch.distributed as dist


def samples(seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(40, 60, (64,), generator=g).tolist()
    yield from itertools.cycle(lengths)


def short_enough(stream, limit):
    for length in stream:
        if length > limit:
            continue
        yield length


def collate(stream, n):
    out = []
    for x in stream:
        out.append(x)
        if len(out) == n:
            yield torch.tensor(out, dtype=torch.float32)
            out = []


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    limit = 64 if rank != 1 else 32
    print("ready", flush=True)
    for batch in collate(short_enough(samples(rank), limit), 8):
        dist.all_reduce(batch)
