"""`make bench`: every ratio, with its limit beside it. Speed is no assertion: it ends with 0 whatever the ratios are.

Each part runs in a process of its own and compares only what took turns within it. On a busy machine the ratios mean
little.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

PARTS = {
    "bench.engine": "inference: the embedded engine, and HTTP",
    "bench.client": "inference: CPU time of the client",
    "bench.step": "a synchronous step, and what recording takes of it",
    "bench.lengths": "widely varying lengths: synchronous and asynchronous against TRL",
    "bench.areal": "a train step against AReaL's",
    "bench.packing": "packed rows, and logits in chunks: time and memory",
    "bench.colocate": "training and inference in turns on one device: memory",
    "bench.asynchrony": "asynchronous against synchronous training, and memory",
    "bench.gateway": "agents: the gateway's requests a second, latency, and a crowd",
    "bench.ranks": "several trainer ranks",
    "bench.hang": "clew hang: merging 100,000 ranks, and real processes",
    "bench.evaluate": "clew eval against its engine alone",
    "bench.replay": "the time machine: size on disk, replay, commands from the shell",
}


def main() -> None:
    """Run the parts one after another."""
    began = time.monotonic()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} (other work on this machine spoils the figures)")
    environment = {
        **os.environ,
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000"),  # as under every command of Clew
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for module, title in PARTS.items():
        print(f"\n{title}  ({module})", flush=True)
        ended = subprocess.run([sys.executable, "-m", module], cwd=Path(__file__).parent.parent, env=environment)
        if ended.returncode != 0:
            print(f"{module} ended with {ended.returncode}; the rest goes on", flush=True)
    print(f"\n{time.monotonic() - began:.0f} s; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
