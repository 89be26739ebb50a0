"""A rank calls another by RPC, and the function there waits for an event that nobody sets."""

import os
import threading

from torch.distributed import rpc

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
has_prompts = threading.Event()


def roll_out(samples: int) -> int:
    has_prompts.wait()
    return samples


rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world)
print("ready", flush=True)
if rank == 0:
    calls = [rpc.rpc_async(f"worker{to}", roll_out, args=(4,), timeout=0) for to in range(1, world)]
    print(sum(call.wait() for call in calls))
rpc.shutdown()
