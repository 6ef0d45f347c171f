"""How long a rank may be in one phase of a step before the others wonder (`world/heartbeat.py`).

A layer of a million tokens of an 8B model lasts 7 s on 8 GPUs, 27 s on two, and 70 s on devices so slow that nothing real is
slower. Patience with the slowest would name a hanging rank after two and a half minutes, where the first step already shows
that half a minute is enough. So the slowest device counts only until there is something better: the plan's seconds where its
rates were measured, and the fastest finished step.
"""

from __future__ import annotations

from typing import final

# FLOP a second that nothing real stays below.
_SLOWEST = {"cuda": 5e13, "cpu": 2e9}
# A layer's backward is three quarters of its work; another half for what disturbs one layer and not the step.
_SLACK = 1.5
# Seconds that a first forward may take longer, in each of its phases: kernels are compiled and memory is pinned there.
FIRST_FORWARD = 60.0


@final
class Patience:
    """Seconds within which a phase has surely ended.

    Args:
        flops: of the longest row, forward and backward, on each of the ranks that share it.
        heaviest: the part of it that the heaviest layer takes; with windows one takes several times the mean.
        device: the type of device that computes.
        planned: seconds of a step with such a row by the plan, 0 where it knows none.
    """

    def __init__(self, flops: float, heaviest: float, device: str, planned: float = 0.0) -> None:
        self._flops, self._heaviest = flops, heaviest
        self._row = flops / _SLOWEST.get(device, _SLOWEST["cuda"])
        self._fastest = 0.0
        if planned:
            self._row = min(self._row, _SLACK * planned)

    def learn(self, flops: float, seconds: float) -> None:
        """A step has ended.

        Args:
            flops: of all its rows, on each rank.
            seconds: that it took.
        """
        self._fastest = max(self._fastest, flops / seconds) if seconds else self._fastest

    @property
    def layer(self) -> float:
        """Of any layer of the longest row."""
        return self._step() * self._heaviest

    @property
    def row(self) -> float:
        """Of the forward of the longest row, the first one too."""
        return self._step() + FIRST_FORWARD

    def _step(self) -> float:
        return min(self._row, _SLACK * self._flops / self._fastest) if self._fastest else self._row
