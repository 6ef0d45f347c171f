"""Limits that are smaller than what a run has in any case: a sentence with numbers that mean something."""

from __future__ import annotations

import pytest

from megaspan.config import SFTConfig
from megaspan.human import UserError
from megaspan.model import prepare
from megaspan.model.limits import check_host_room
from megaspan.plan import Machine, choose, model_facts
from megaspan.plan.facts import ModelFacts
from tests.model.support import plan as by_hand
from tests.models import tiny

GPU, CPU = Machine("NVIDIA H200", 139 * 2**30, 128 * 2**30, 16), Machine("CPU", 0, 128 * 2**30, 4)


def test_a_host_that_is_full_before_a_layer_keeps_anything() -> None:
    model, args = tiny("qwen3"), SFTConfig(max_length=64, host_memory="1MiB", use_cpu=True)
    plan = choose(args, ModelFacts.from_config(model.config.to_dict()), CPU)
    words = r"all else takes 1\.0 GiB, 1\.0 GiB more than there is; got 1\.0 MiB \(host_memory\)\. Raise host_memory"
    with pytest.raises(UserError, match=words):
        check_host_room(plan)
    with pytest.raises(UserError, match=words):
        prepare(model, args, plan)
    prepare(model, args, by_hand())  # one that says nothing of it


def test_a_host_that_keeps_nothing_needs_no_room() -> None:
    facts, off = model_facts("qwen3-0.6b"), {"offload": False}
    for options in ({"host_memory": "2GiB", "gradient_checkpointing_kwargs": off}, {"host_memory": "100GiB"}):
        plan = choose(SFTConfig(max_length=8192, **options), facts, GPU)
        check_host_room(plan)
