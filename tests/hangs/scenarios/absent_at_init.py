"""Rank 1 sleeps before it joins the others."""

import os
import time

import torch.distributed as dist

print("ready", flush=True)
if os.environ["RANK"] == "1":
    time.sleep(3600)
dist.init_process_group("gloo")
