import json
import random

import numpy as np
import torch

from megaspan.store.random_state import random_state, restore_random_state
from megaspan.store.tensors import join_state, split_state


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    )


def test_every_generator_goes_on_as_if_nothing_had_happened():
    draw()
    skeleton, tensors = split_state(random_state(), "random")
    want = draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert draw() != want
    restore_random_state(join_state(json.loads(json.dumps(skeleton)), tensors))
    assert draw() == want
