"""Rank 0 has a program stage a data set to local disk, at a limited rate; the other rank waits at a barrier."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

COPY = """
import sys, time
with open(sys.argv[1], "rb") as source, open(sys.argv[2], "wb") as target:
    while piece := source.read(1 << 18):
        target.write(piece)
        time.sleep(0.1)
"""


def stage(folder):
    source = Path(folder, "shard.bin")
    source.write_bytes(bytes(100_000_000))
    subprocess.run([sys.executable, "-c", COPY, str(source), str(Path(folder, "local.bin"))], check=True)


dist.init_process_group("gloo")
print("ready", flush=True)
with tempfile.TemporaryDirectory() as folder:
    if dist.get_rank() == 0:
        stage(folder)
    dist.barrier()
