"""A few steps of ordinary training on a tiny model, for tests of what is saved in the middle of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.models import batch, tiny


class Masters:
    """bf16 parameters with fp32 masters and a schedule: an optimizer whose state is as nested as a real one's."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.masters = [parameter.detach().clone().float() for parameter in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.adam, lambda step: 1 / (step + 1))

    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = parameter.grad.float()
        self.adam.step()
        self.schedule.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "masters": self.masters, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        self.schedule.load_state_dict(state["schedule"])
        with torch.no_grad():
            for master, saved in zip(self.masters, state["masters"], strict=True):
                master.copy_(saved)


def start(family: str = "llama", *, lora: bool = False, **options: Any) -> tuple[Any, Masters]:
    """A new model and optimizer, always the same ones."""
    torch.manual_seed(0)
    model: Any = tiny(family, dtype=torch.bfloat16, **options)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.5))
    return model, Masters(model)


def train(model: Any, optimizer: Masters, first: int, last: int) -> list[float]:
    """Losses of steps `first` … `last` - 1, each on its own batch; noise in the inputs draws on the random number state."""
    losses = []
    for step in range(first, last):
        inputs = batch(24, seed=step)
        noise = torch.rand(1, 24, model.config.hidden_size).to(torch.bfloat16)
        embedded = model.get_input_embeddings()(inputs["input_ids"]) + 0.1 * noise
        logits = model(inputs_embeds=embedded).logits.float()
        loss = F.cross_entropy(logits[0, :-1], inputs["labels"][0, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
