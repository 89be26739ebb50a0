"""What all tests share: one thread of torch in each process, so that the processes of a test do not fight for cores.
No time limit on a property's examples either: that would be a timed assertion."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded, here and in the processes that tests start

settings.register_profile("clew", deadline=None)
settings.load_profile("clew")
