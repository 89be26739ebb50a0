"""What all tests share: one thread of torch in each process, so that the processes of a test do not fight for cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded, here and in the processes that tests start
