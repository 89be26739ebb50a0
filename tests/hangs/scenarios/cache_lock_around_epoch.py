"""The trainer holds its cache's lock for an epoch. The workers of its data loader want it for what is not cached."""

import pickle
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from torch.utils.data import DataLoader, Dataset

CACHE = Path(tempfile.mkdtemp())


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        file = CACHE / f"{index}.pkl"
        if not file.exists():
            with FileLock(CACHE / "lock"):
                file.write_bytes(pickle.dumps([float(index)] * 4))
        return torch.tensor(pickle.loads(file.read_bytes()))


if __name__ == "__main__":
    net = torch.nn.Linear(4, 1)
    with FileLock(CACHE / "lock"):
        print("ready", flush=True)
        for batch in DataLoader(Rows(), batch_size=8, num_workers=2):
            net(batch).sum().backward()
