"""For all tests: one thread a process, since the tensors are tiny and `pytest -n 2` has a process for each core.

The variable is for processes that tests start: two of them with two spinning threads each are ten times as slow on two cores.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

torch.set_num_threads(1)
# A deadline of milliseconds by the clock fails on a machine that does something else too.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
