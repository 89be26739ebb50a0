"""A worker of rank 1's data loader sleeps."""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, place):
        if place == 5 and dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(3600)
        return torch.tensor([float(place)])


dist.init_process_group("gloo")
print("ready", flush=True)
for batch in DataLoader(Rows(), batch_size=2, num_workers=1):
    dist.all_reduce(batch.mean())
