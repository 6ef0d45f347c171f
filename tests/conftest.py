"""For all tests: one thread a process, since the tensors are tiny and `pytest -n 2` has a process for each core."""

import torch

torch.set_num_threads(1)
