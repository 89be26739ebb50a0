"""Each rank makes the prefix of its keys in the store from its options, and those of rank 2 differ."""

import os

import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
options = {"lr": 0.1, "batch": 8 if rank == 2 else 16}
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.TCPStore(address, port, world, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
prefix = "-".join(f"{name}{value}" for name, value in options.items())
store = dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]
print("ready", flush=True)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
