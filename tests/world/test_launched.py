"""How this process was started, from made-up environments."""

from __future__ import annotations

import pytest

from megaspan import world

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
    "ROLE_NAME": "default", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, world.Launch("python", 0, 1, 0)),
        ({"ACCELERATE_LOG_LEVEL": "info"}, world.Launch("python", 0, 1, 0)),  # the user's own, not the launcher's
        (TORCHRUN, world.Launch("torchrun", 3, 8, 1, 2, ("node0", 29500), False, 2)),
        (TORCHRUN | {"ROLE_NAME": "megaspan"}, world.Launch("megaspan train", 3, 8, 1, 2, ("node0", 29500), False, 2)),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},  # by hand: no agent keeps a store
            world.Launch("torchrun", 0, 2, 0, 2, ("a", 1), True),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "ACCELERATE_MIXED_PRECISION": "bf16"}, world.Launch("accelerate launch", 0, 1, 0)),
    ],
)
def test_the_launcher_is_recognised(environ, launch):
    assert world.launch(environ) == launch


def test_nodes_are_counted():
    assert world.launch(TORCHRUN).nodes == 4
    assert world.launch({}).nodes == 1


def test_children_share_the_cores_unless_the_user_says_otherwise():
    for environ, threads in (({}, "4"), ({"OMP_NUM_THREADS": "7"}, "7")):
        world.share_cores(2, 9, environ)
        assert environ["OMP_NUM_THREADS"] == threads
