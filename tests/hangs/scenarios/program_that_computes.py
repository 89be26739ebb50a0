"""No hang: rank 1 waits in a barrier while a program that rank 0 has started computes."""

import subprocess
import sys

import torch.distributed as dist

BUILD = """
import hashlib
state, table = b"unit", {}
for i in range(400_000_000):
    state = hashlib.sha256(state).digest()
    table[state[:2]] = i
"""

dist.init_process_group("gloo")
dist.barrier()
print("ready", flush=True)
if dist.get_rank() == 0:
    subprocess.run([sys.executable, "-c", BUILD], capture_output=True, check=True)
dist.barrier()
