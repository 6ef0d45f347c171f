"""For all tests: one thread a process, since the tensors are tiny and `pytest -n 2` has a process for each core.

The variable is for processes that tests start: two of them with two spinning threads each are ten times as slow on two cores.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

torch.set_num_threads(1)
# A deadline of milliseconds by the clock fails on a machine that does something else too. And `make test` draws the same
# examples each time, so that what it says of a change is about the change; `make test-all` draws others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("others", deadline=None)
settings.load_profile("same")
