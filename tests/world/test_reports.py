"""What `megaspan env` prints."""

from __future__ import annotations

from megaspan import world


def test_versions_and_the_report_name_everything_a_bug_report_needs():
    report = world.environment_report()
    assert report["versions"]["torch"]
    assert set(world.PACKAGES) <= set(report["versions"])
    assert {
        "driver",
        "gpus",
        "cudnn",
        "cuda",
        "attention_kernels",
        "expandable_segments",
        "host_memory",
        "cgroup_limit",
        "locked_memory_limit",
    } <= set(report)
