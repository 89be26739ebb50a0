"""Each rank reduces its buckets, each in a group of its own, in the order in which they became ready on that rank."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Bucket:
    def __init__(self, size):
        self.values, self.group = torch.ones(size), dist.new_group(list(range(world)))

    def flush(self):
        dist.all_reduce(self.values, group=self.group)


class Reducer:
    def __init__(self):
        self.dense, self.experts = Bucket(8), Bucket(4)

    def finish(self, ready):
        for bucket in ready:
            bucket.flush()


reducer = Reducer()
for step in range(100):
    unused = rank == 2 and step > 2
    reducer.finish([reducer.dense, reducer.experts] if unused else [reducer.experts, reducer.dense])
    print("ready" if step == 2 else f"step {step}", flush=True)
