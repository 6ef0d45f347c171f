"""The update of parameters, wherever master, moments and gradient lie.

What is all on the device is updated in one call, without any memory above it. What lies on the host comes in pieces: master,
moments, gradient in, the arithmetic of the device, master and moments out, and the weight's slice is set to its master's. The
arithmetic goes element by element (8-bit moments: block by block), so the pieces change no bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from megaspan.optimizer.conveyor import Conveyor, Task, pieces
from megaspan.optimizer.trained import Part, Rule, Trained


@final
class Update:
    """Applies one rule.

    Args:
        rule: the arithmetic.
        conveyor: brings pieces from the host and back.
    """

    def __init__(self, rule: Rule, conveyor: Conveyor) -> None:
        self._rule, self._conveyor = rule, conveyor

    @torch.no_grad()
    def __call__(
        self, todo: Sequence[Trained], rate: float, *, factor: Tensor | None = None, stop: Tensor | None = None
    ) -> None:
        """Updates parameters that have a gradient.

        Args:
            todo: the parameters; the gradient is the one on the device, or else the gathered one.
            rate: the learning rate.
            factor: scalar that multiplies each gradient first, in place.
            stop: as in `Rule.update`.
        """
        direct = [trained for trained in todo if not trained.on_host and trained.gradient is not None]
        for trained in direct:
            self.make_moments(trained)
            if factor is not None:
                _gradient(trained).mul_(factor)
        for decay in dict.fromkeys(trained.decay for trained in direct):
            parts = [_whole(trained) for trained in direct if trained.decay == decay]
            self._rule.update(parts, rate=rate, decay=decay, stop=stop)
        for trained in direct:
            trained.stepped = True
            if trained.master is not None:
                trained.weight.copy_(trained.master)
        rest = [trained for trained in todo if trained.on_host or trained.gradient is None]
        self._conveyor.run(task for trained in rest for task in self._tasks(trained, rate, factor, stop))

    def make_moments(self, trained: Trained) -> None:
        """Sees to it that the moments of a parameter exist, zero before its first update; on the host they always do."""
        if not trained.moments:
            device = trained.weight.device
            for name, entry in self._rule.entries(trained).items():
                trained.moments[name] = torch.zeros(entry.shape, dtype=entry.dtype, device=device)

    def _tasks(self, trained: Trained, rate: float, factor: Tensor | None, stop: Tensor | None) -> Iterator[Task]:
        self.make_moments(trained)
        count = trained.weight.numel()
        if count == 0:  # a rank may hold no row of a small parameter
            trained.step += 1
            trained.stepped = True
        spans = {name: entry.span for name, entry in self._rule.entries(trained).items()}
        for cut in pieces(count):
            yield self._task(trained, cut, spans, rate, factor, stop, last=cut.stop == count)

    def _task(
        self, trained: Trained, cut: slice, spans: dict[str, int], rate: float, factor: Tensor | None, stop: Tensor | None,
        *, last: bool,
    ) -> Task:  # fmt: skip
        weight = trained.weight.view(-1)[cut]
        state = {name: _cut(trained.moments[name].view(-1), cut, span) for name, span in spans.items()}
        if trained.master is not None:
            state["master"] = trained.master.view(-1)[cut]
        on_device = trained.gradient
        there = list(state) if trained.on_host else []
        fetch = [state[name] for name in there]
        if on_device is None:
            assert trained.gathered is not None
            fetch.append(trained.gathered[cut])

        def work(*buffers: Tensor) -> None:
            here = state | dict(zip(there, buffers, strict=False))
            gradient = buffers[-1] if on_device is None else on_device.reshape(-1)[cut]
            if factor is not None:
                gradient.mul_(factor)
            master = here.pop("master", None)
            step = trained.step.clone()  # every piece makes the same step
            self._rule.update(
                [Part(weight if master is None else master, gradient, here, step)], rate=rate, decay=trained.decay, stop=stop
            )
            if master is not None:
                weight.copy_(master)
            if last:
                trained.step.copy_(step)
                trained.stepped = True

        return Task(fetch, work, back=len(there))


def _gradient(trained: Trained) -> Tensor:
    gradient = trained.gradient
    assert gradient is not None
    return gradient


def _whole(trained: Trained) -> Part:
    target = trained.weight if trained.master is None else trained.master
    return Part(target, _gradient(trained), trained.moments, trained.step)


def _cut(values: Tensor, cut: slice, span: int) -> Tensor:
    """The values that belong to a slice of weights."""
    return values[cut.start // span : -(-cut.stop // span)]


def host_sizes(rule: Rule, trained: Iterable[Trained], *, state: bool, gradients: bool) -> list[tuple[int, torch.dtype]]:
    """(elements, type) of everything that is going to lie on the host, in the order in which it is taken."""
    sizes: list[tuple[int, torch.dtype]] = []
    for each in trained:
        count = each.weight.numel()
        if state:
            sizes += [(count, torch.float32)] * (each.master is not None)
            sizes += [(entry.count, entry.dtype) for entry in rule.entries(each).values()]
        if gradients:
            sizes.append((count, each.gradient_dtype))
    return sizes
