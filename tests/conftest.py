"""Settings that all tests share: one thread of torch in each process, so that they do not fight for cores.
No time limit on a property's examples either: that would be a timed assertion."""

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The tests compare bit for bit, and start more ranks than there may be GPUs. CUDA_VISIBLE_DEVICES=0 lets them use one.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded, here and in the processes that tests start

settings.register_profile("clew", deadline=None)
settings.load_profile("clew")


@pytest.fixture(autouse=True)
def _same_number_of_threads() -> Iterator[None]:
    """Undo what a replay in this process sets: it takes as many threads of torch as the recorded run had."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
