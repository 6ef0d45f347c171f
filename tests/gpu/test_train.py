"""On a GPU, whole runs: resume bit-equal under full determinism, masters and LoRA train, a signal leaves a checkpoint in time.

python -m pytest tests/gpu/test_train.py -m gpu -s
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from megaspan import SFTConfig, SFTTrainer
from megaspan.trainer.interrupt import Interrupted
from tests.trainer.support import assert_same_bits, documents, logged, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SHAPE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
DATA = documents([3000, 1700, 4096, 2049], seed=1)


def trainer(folder: Path, out: str, *, callbacks: Any = None, data: Any = DATA, **changes: Any) -> SFTTrainer:
    """A small shape with random weights, rows of up to 4,096 tokens."""
    shape = folder / "shape"
    shape.mkdir(exist_ok=True)
    (shape / "config.json").write_text(json.dumps(SHAPE))
    own = {
        "output_dir": str(folder / out), "model_name_or_path": str(shape), "max_length": 4096, "packing": False, "max_steps": 4,
        "learning_rate": 1e-3, "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    return SFTTrainer(args=SFTConfig(**(own | changes)), train_dataset=data, callbacks=callbacks)


class Stop(TrainerCallback):
    """Ends the run after two steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 2


def test_resume_is_bit_equal_under_full_determinism(tmp_path: Path) -> None:
    """Weights, masters' roundings and every logged number."""
    options = {"full_determinism": True, "save_strategy": "steps", "save_steps": 2}
    try:
        whole = trainer(tmp_path, "whole", **options)
        whole.train()
        trainer(tmp_path, "parts", callbacks=[Stop], **options).train()
        resumed = trainer(tmp_path, "parts", **options)
        resumed.train(resume_from_checkpoint=True)
        assert_same_bits(weights(resumed.model), weights(whole.model))
        assert logged(tmp_path / "parts") == logged(tmp_path / "whole")
    finally:
        torch.use_deterministic_algorithms(False)


def test_masters_keep_what_bf16_weights_lose(tmp_path: Path) -> None:
    """With a rate of 1e-6 an update is far below bf16's step: pure bf16 stands still, masters move."""
    moved = {}
    for dtype in (None, "bfloat16"):
        run = trainer(tmp_path, f"run-{dtype}", dtype=dtype, learning_rate=1e-6, lr_scheduler_type="constant")
        before = weights(run.model)
        run.train()
        assert {parameter.dtype for parameter in run.model.parameters()} == {torch.bfloat16}
        moved[dtype] = sum(int((weights(run.model)[name] != value).sum()) for name, value in before.items())
        losses = [entry["loss"] for entry in logged(tmp_path / f"run-{dtype}")]
        assert all(loss == pytest.approx(losses[0], rel=0.05) for loss in losses)
    print(json.dumps({"weights that changed": {str(name): count for name, count in moved.items()}}))
    assert moved[None] > moved["bfloat16"]


def test_an_adapter_trains_and_stock_peft_loads_it(tmp_path: Path) -> None:
    """LoRA in bf16 with every lever on."""
    peft = pytest.importorskip("peft")
    run = trainer(tmp_path, "lora", use_peft=True, lora_r=8, lora_target_modules="all-linear", learning_rate=1e-2)
    run.train()
    losses = [entry["loss"] for entry in logged(tmp_path / "lora")]
    assert losses[-1] < losses[0]
    run.save_model()
    saved = peft.PeftConfig.from_pretrained(str(tmp_path / "lora" / "model"))
    assert saved.r == 8


def test_a_signal_in_a_long_step_leaves_a_checkpoint_within_30_seconds(tmp_path: Path) -> None:
    """0.6B with fp32 masters at 65,536 tokens, 14 bytes a parameter on disk; from the signal to the exception."""
    sent = []

    class Interrupt(TrainerCallback):
        """Sends SIGTERM one and a half seconds into the second step: in its backward."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                threading.Timer(1.5, self.send).start()

        def send(self) -> None:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

    args = SFTConfig(
        output_dir=str(tmp_path / "run"), model_name_or_path="qwen3-0.6b", max_length=65_536, max_steps=3, disable_tqdm=True,
        allow_past_window=True,
    )  # fmt: skip
    rows = [{"input_ids": torch.randint(0, 150_000, (65_536,)).tolist()} for _ in range(3)]
    run = SFTTrainer(args=args, train_dataset=rows, callbacks=[Interrupt])
    with pytest.raises(Interrupted):
        run.train()
    seconds = time.monotonic() - sent[0]
    checkpoint = tmp_path / "run" / "checkpoint-1"
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    print(json.dumps({"seconds from SIGTERM": round(seconds, 1), "checkpoint GB": round(size / 1e9, 2)}))
    assert seconds < 30
