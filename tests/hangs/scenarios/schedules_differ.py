"""Two stages of torch's pipeline run with different numbers of micro-batches."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
stage = PipelineStage(torch.nn.Linear(8, 8), rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=4 if rank else 2)
print("ready", flush=True)
with torch.no_grad():
    schedule.step(torch.ones(8, 8)) if rank == 0 else schedule.step()
dist.barrier()
