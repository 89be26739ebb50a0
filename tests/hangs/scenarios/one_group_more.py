"""Two of three ranks have made a group that the third one has not, so their next groups have different names."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
value = torch.ones(1)
dist.all_reduce(value)
print("ready", flush=True)
if rank != 1:
    dist.all_reduce(value, group=dist.new_group([0, 2]))
else:
    time.sleep(1)  # otherwise its group may take the name of theirs, and chance decides who hangs where
everybody = dist.new_group([0, 1, 2])
dist.all_reduce(value, group=everybody)
