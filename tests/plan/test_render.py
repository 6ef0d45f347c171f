"""What a plan prints: whole, explained, and without contradictions, for any model and machine."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megaspan.config import SFTConfig
from megaspan.plan import Machine, Plan, RankSizes, plan_command
from megaspan.plan.ranks import share_of
from tests.models import tiny_config

H200 = Machine("NVIDIA H200", 143 * 10**9, 2 * 2**40, 64, "MemTotal")
CPU = Machine("CPU", 0, 64 * 2**30, 16, "cgroup limit")


def planned(machine: Machine = H200, nproc: int | None = None, **options: Any) -> Plan:
    wishes = {"model_name_or_path": "qwen3-4b", "max_length": "128k", "model_init_kwargs": {"rope_parameters": "auto"}}
    made = SFTConfig(**{**wishes, **options})
    sizes = RankSizes.of(made, nproc) if nproc else None
    return plan_command(made, share_of(machine, nproc) if nproc else machine, sizes)


CASES: list[tuple[Machine, int | None, dict[str, Any]]] = [
    (H200, None, {}),
    (H200, None, {"max_length": "4k", "model_name_or_path": "qwen3-0.6b"}),
    (H200, None, {"max_length": "2M", "model_name_or_path": "qwen3-8b", "host_memory": "300GiB"}),
    (H200, 2, {"max_length": "16k", "gradient_checkpointing": False}),
    (H200, 8, {"max_length": "4M", "cp_size": 8, "model_name_or_path": "qwen3-8b", "memory_limit": "80GiB"}),
    (H200, None, {"loss_type": "nll", "max_length": "32k", "use_peft": True}),
    (CPU, None, {"max_length": "16k"}),
    (CPU, 2, {"max_length": "8k", "model_name_or_path": "qwen3-0.6b"}),
    (CPU, None, {"max_length": "1M", "memory_limit": "40GiB"}),
]


@pytest.mark.parametrize(("machine", "nproc", "options"), CASES)
def test_every_letter_is_explained_every_sum_is_right_and_no_line_breaks_in_a_word(
    machine: Machine, nproc: int | None, options: dict[str, Any]
) -> None:
    plan = planned(machine, nproc, **options)
    text = plan.render()
    for place, needed in (("device", plan.device_needed), ("host", plan.host_bytes)):
        parts = [part.bytes for part in plan.parts if part.place == place]
        assert sum(parts) == needed
        assert len(parts) < 2 or re.search(rf"^{place} +in all +[\d.]+ [GM]iB$", text, re.M)
    (legend,) = re.findall(
        r"^letters: .*(?=\n\n)", text, re.M
    )  # one line: whoever shows it breaks it once, where the terminal ends
    formulas = " ".join([*(part.formula for part in plan.parts), plan.largest.formula])
    used = set(re.findall(r"(?<![\w'])([tEQKHFVGLDTx])(?![\w'])", formulas)) - {"x"}
    for letter in used:
        assert re.search(rf"\b{letter} = [\d,]+", legend + formulas), letter
    assert f"t = {plan.tokens_per_rank:,} (tokens of" in legend
    assert not re.search(r"(?<!, )\b1 (layers|copies|ranks|segments)\b", text)
    titles = ("At the peak", "Moments of a step (tensors alone)", "Levers")
    assert all(re.search(rf"^{re.escape(title)}", text, re.M) for title in titles)
    json.dumps(plan.as_dict())


def test_seconds_of_one_gpu_are_not_said_of_another() -> None:
    """Rates are those of an H200: a CPU's plan that says `takes 0.34 s` in one line and `unknown` in another errs."""
    assert "the rest, again, is computed" in planned(CPU, max_length="16k", host_memory="60GiB").summary
    short = planned(max_length="2M", model_name_or_path="qwen3-8b", host_memory="300GiB")
    assert re.search(r"the rest, again, takes .* on an H200", short.summary)
    assert "to compare" not in short.render()
    long = {"max_length": "2M", "model_name_or_path": "qwen3-8b", "host_memory": "300GiB", "memory_limit": "140GiB"}
    elsewhere = planned(CPU, **long)  # on another GPU the two lines say how they go together
    assert elsewhere.seconds.total is None
    assert "on an H200" in elsewhere.summary
    assert "Seconds of a step: unknown" in elsewhere.render()
    assert "the time on an H200 that is named in the answer is there to compare" in elsewhere.render()
    assert elsewhere.as_dict()["seconds_note"].endswith("to compare")
    single = planned(**(long | {"model_name_or_path": "qwen3-8b", "bf16": False, "host_memory": "600GiB"}))
    assert single.seconds.total is None  # in fp32 nothing is known of any GPU
    assert "the rest, again, is computed" in single.summary


def test_a_plan_for_another_machine_does_not_speak_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["megaspan.plan.choose"], "has_flash4", lambda: False)
    elsewhere = planned(CPU, max_length="32k", memory_limit="80GiB").render()
    assert "what is installed there is not known; if flash-attn-4 is, attention is up to a fifth faster" in elsewhere
    assert "not installed here" not in elsewhere
    assert "of 64.0 GiB (cgroup limit of this machine; host_memory says what the other has)" in elsewhere
    assert "flash-attn-4 is not installed here" in planned(max_length="32k").render()


@pytest.mark.parametrize(
    ("nproc", "options", "words"),
    [
        (8, {"host_memory": "1TiB"}, "of 128.0 GiB (1.00 TiB / 8 ranks; host_memory)"),
        (8, {}, "of 256.0 GiB (2.00 TiB / 8 ranks; MemTotal)"),
        (16, {"host_memory": "1TiB"}, "of 128.0 GiB (1.00 TiB of each machine / 8 ranks; host_memory)"),
        (None, {"host_memory": "1TiB"}, "of 1.00 TiB (host_memory)"),
    ],
)
def test_ranks_are_said_to_share_the_host(nproc: int | None, options: dict[str, Any], words: str) -> None:
    assert words in planned(nproc=nproc, **options, **({"cp_size": nproc} if nproc else {})).render()


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_moe", "granite"])
def test_other_families_are_explained_too(tmp_path: Path, family: str) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    plan = planned(max_length=4096, model_name_or_path=str(tmp_path), model_init_kwargs=None)
    assert re.search(r"^letters: t = 4,096 \(tokens of the row\)", plan.render(), re.M)
