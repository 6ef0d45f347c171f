"""Bytes of a training step as pure arithmetic, every number with the formula it came from.

What is modelled is what runs: layers streamed in tiles or checkpointed whole, what they keep on the device, in host memory or
on disk, segments that run again, the loss in tiles, AdamW. Anchors: layer inputs that others reported (28 layers x 131,072 x
1,024: 7.52 GB), and peaks of whole checkpointed layers measured on one H200 (4B shape in pure bf16, 32k to 131k tokens), which
these formulas meet within 2 %.

Letters: t tokens, E hidden, Q = heads x head size, V vocabulary, c bytes of the computation's type (2 for bf16).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from megaspan.human import format_tokens
from megaspan.plan.facts import ModelFacts
from megaspan.plan.keep import KeepPolicy, Place
from megaspan.plan.logits import loss_tile as loss_tile
from megaspan.plan.parts import Part, Settings, bytes_of
from megaspan.plan.ranks import RankSizes
from megaspan.plan.segments import held_bytes
from megaspan.plan.step import CONTEXT_BYTES as CONTEXT_BYTES
from megaspan.plan.step import SLACK, Pair, Step, layers_of, slack_of
from megaspan.plan.streamed import Phase
from megaspan.plan.weights import state_parts, update_part

KEPT = ("layer inputs", "attention outputs", "layers run again", "on the way to and from disk")  # by layers, on the host


class Moment(NamedTuple):
    """A moment of the step with everything that is on the device then (on the CPU: in host memory).

    Attributes:
        name: in words.
        bytes: of the tensors: what an allocator calls its peak.
        always: tensors of every moment.
        own: tensors of this moment; some may have no bytes.
        base: the context or the process beside them.
    """

    name: str
    bytes: int
    always: list[Part]
    own: list[Part]
    base: Part

    @property
    def needed(self) -> int:
        """With what lies beside the tensors: what has to be there."""
        return self.bytes + slack_of(self.bytes) + self.base.bytes

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its tensors."""
        return tuple(part for part in (*self.always, *self.own) if part.bytes)

    @property
    def beside(self) -> tuple[Part, ...]:
        """Context or process, and slack."""
        allowance = f"allowance: {SLACK:.0%} of the tensors"
        return self.base, Part("slack", slack_of(self.bytes), self.base.place, allowance)


class Memory:
    """All moments of a step, and what lies elsewhere all the time; both are worked out when they are asked for.

    Args:
        step: with its dials.
        policy: what layers keep.
    """

    def __init__(self, step: Step, policy: KeepPolicy) -> None:
        self._step, self._policy, self.gpu = step, policy, step.s.gpu

    @cached_property
    def moments(self) -> list[Moment]:
        """All that can be the peak."""
        step, always = self._step, bytes_of(self._step.always)
        found = _moments(step, self._policy)
        return [Moment(name, always + bytes_of(own), step.always, own, step.base) for name, own in found]

    @cached_property
    def waiting(self) -> tuple[Part, ...]:
        """What lies in host memory or on disk beside the computation."""
        return waiting_parts(self._step, self._policy)

    @cached_property
    def peak(self) -> Moment:
        """The moment that needs most."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def device_bytes(self) -> int:
        """Peak of the tensors on the device; 0 without a GPU."""
        return self.peak.bytes if self.gpu else 0

    @property
    def device_needed(self) -> int:
        """The same with the context and slack."""
        return self.peak.needed if self.gpu else 0

    @property
    def host_bytes(self) -> int:
        """Peak of host memory."""
        return sum(part.bytes for part in self.waiting if part.place == "host") + (0 if self.gpu else self.peak.needed)

    @property
    def host_kept(self) -> int:
        """What layers keep in host memory, of which `host_bytes` has the rest too."""
        return sum(part.bytes for part in self.waiting if part.place == "host" and part.name.startswith(KEPT))

    @property
    def disk_bytes(self) -> int:
        """What layers keep on disk."""
        return sum(part.bytes for part in self.waiting if part.place == "disk")


def memory(facts: ModelFacts, s: Settings) -> Memory:
    """Every moment of a step from the second on, when the optimizer's state exists."""
    return Memory(Step(facts, s), s.policy(facts.layers))


def _moments(step: Step, policy: KeepPolicy) -> Iterator[tuple[str, list[Part]]]:
    """Names and tensors, those that are always there left out."""
    facts, s, total = step.facts, step.s, step.facts.layers
    yield "forward", [*step.earlier, *_kept(step, policy, max(0, total - 1) if s.streams else total), *step.forward(policy)]
    yield "loss", [*step.earlier, *_kept(step, policy, total), *_flying(step, policy), *step.loss]
    for index in _telling_layers(step, policy):
        yield from _backward(step, policy, index)
    if s.streams:
        for segment in policy.segments:
            if len(segment) > 1:
                stored = _stored(step, policy, segment, segment.stop)
                held = [step.gradient(total - segment.stop), *_kept(step, policy, segment.stop), *_run_again(step, stored)]
                yield f"layers {segment[0] + 1} to {segment[-1] + 1} again", [*held, *step.again(policy, segment)]
    if step.embedding:
        yield "backward of the embedding", [step.gradient(total), *step.embedding]
    yield "optimizer", [step.gradient(total), update_part(facts, s)]


def _backward(step: Step, policy: KeepPolicy, index: int) -> Iterator[tuple[str, list[Part]]]:
    """The phases of one layer's backward. A checkpointed layer's gradients are part of its work until it is done."""
    s, total, name = step.s, step.facts.layers, f"backward of layer {index + 1}"
    if not s.checkpoint:
        gradient, everything = step.gradient(total - index), step.activations(index + 1)
        yield from ((name, [gradient, everything, *phase.parts]) for phase in step.phases)
        return
    gradient = step.gradient(total - index - 1)
    ahead = "of this layer, and of the one below"
    if s.stream_back:
        attends = policy.attends == "device" and policy.layers[index].output is None
        ahead = "two tiles of an input, and the output that was attended again" if attends else "of two tiles"
    for phase in step.phases:
        kept = step.kept(*_on_device(policy, index, phase))
        again = _run_again(step, _stored(step, policy, policy.segment_of[index], index + 1, phase))
        size = step.fetched(phase, policy, index)
        fetched = Part("inputs and outputs fetched", size, s.place, f"{ahead}; an input is t x E, an output t x Q")
        yield f"{name}, {phase.name}" if phase.name else name, [gradient, *kept, *again, fetched, *phase.parts]


def _kept(step: Step, policy: KeepPolicy, layers: int) -> list[Part]:
    """What the lowest layers keep on the device; with everything kept, all they computed."""
    return step.kept(*policy.below["device"][layers]) if step.s.checkpoint else [step.activations(layers)]


def _on_device(policy: KeepPolicy, index: int, phase: Phase) -> Pair:
    """What is kept on the device while a layer is worked on: everything up to it, but its output once that was used."""
    inputs, outputs = policy.below["device"][index + 1]
    gone = not phase.uses_output and policy.layers[index].output == "device"
    return inputs, outputs - gone


def _stored(step: Step, policy: KeepPolicy, segment: range, stop: int, phase: Phase | None = None) -> Pair:
    """What a segment that was run again has on the device, of its layers below `stop`, in a phase of the last of them."""
    if policy.again != "device" or len(segment) == 1:
        return 0, 0
    top = stop - 1 if phase is not None and not phase.uses_output else stop
    outputs = sum(policy.layers[index].output is None for index in range(segment.start, min(top, segment.stop - 1)))
    return stop - segment.start - 1, outputs


def _run_again(step: Step, stored: Pair) -> list[Part]:
    inputs, outputs = stored
    if stored == (0, 0):
        return []
    size = inputs * step.input + outputs * step.output
    return [Part("layers run again", size, step.s.place, f"{inputs} inputs, {outputs} outputs of a segment")]


def _flying(step: Step, policy: KeepPolicy) -> list[Part]:
    """At the loss: what the last layers sent to the host, and the device has not let go of.

    Of a streamed layer that is its output: its input went when its own attention began.
    """
    s, last = step.s, policy.layers[-2:] if not step.s.streams else policy.layers[-1:]
    if not s.checkpoint or step.tiles:
        return []
    inputs = 0 if s.streams else sum(layer.input not in ("device", None) for layer in last)
    outputs = sum(layer.output not in ("device", None) for layer in last)
    size = inputs * step.input + outputs * step.output
    return [Part("inputs and outputs in flight", size, s.place, f"{inputs} inputs, {outputs} outputs on their way")]


def _telling_layers(step: Step, policy: KeepPolicy) -> tuple[int, ...]:
    """The top and the lowest layer, and of all that can be the peak the one that is."""
    total = step.facts.layers
    corners = {0, 1, total - 2, total - 1}
    if step.s.checkpoint:
        for kind in policy.kinds:
            corners |= {kind.first - 1, kind.first, kind.first + 1, kind.last}
        corners |= {segment[-1] for segment in policy.segments if len(segment) > 1}
    heaviest = step.heaviest

    def size(index: int) -> int:
        """Bytes of the heaviest phase, those that are the same in every layer left out."""
        if not step.s.checkpoint:
            return step.gradient(total - index).bytes + step.activations(index + 1).bytes
        pairs = _on_device(policy, index, heaviest), _stored(step, policy, policy.segment_of[index], index + 1, heaviest)
        held = sum(inputs * step.input + outputs * step.output for inputs, outputs in pairs)
        return step.gradient(total - index - 1).bytes + held + step.fetched(heaviest, policy, index)

    inside = [index for index in corners if 0 <= index < total]
    return tuple(sorted({total - 1, 0, max(inside, key=size)}, reverse=True))


def waiting_parts(step: Step, policy: KeepPolicy) -> tuple[Part, ...]:
    """What lies in host memory or on disk beside the computation, at the worst moment."""
    facts, s = step.facts, step.s
    parts, pinned = [], ", pinned" if s.gpu else ""
    if s.checkpoint:
        row = f"{format_tokens(s.slots)} tokens x"
        wide = f"({facts.query_width:,} x {s.compute_bytes} + {facts.heads} x 4) B"
        narrow = f"{facts.hidden:,} x {s.compute_bytes} B"
        places: tuple[tuple[Place, str], ...] = (("host", pinned), ("disk", " on disk"))
        for place, where in places:
            inputs, outputs = policy.below[place][-1]
            parts += [
                Part(f"layer inputs{where}", inputs * step.input, place, f"{layers_of(inputs)} x {row} {narrow}"),
                Part(f"attention outputs{where}", outputs * step.output, place, f"{layers_of(outputs)} x {row} {wide}"),
            ]
        held = list(held_bytes(policy, step.input, step.output, "host")) if policy.given_up else [0]
        formula = "more than all of the above, when a segment has run again and those above it are gone"
        parts.append(Part(f"layers run again{pinned}", max(held) - held[0], "host", formula))
        staged = staged_bytes(step) if "disk" in policy.places else 0
        parts.append(Part("on the way to and from disk", staged, "host", "2 layers x (input and output)"))
    return tuple(part for part in (*parts, *step.on_host) if part.bytes)


def staged_bytes(step: Step) -> int:
    """Host memory through which what lies on disk passes: one layer coming while another is read."""
    return 2 * (step.input + step.output)


def disk_parts(facts: ModelFacts, s: Settings, checkpoints: int) -> list[Part]:
    """What a run leaves on disk: checkpoints with the optimizer, and the final model."""
    s = replace(s, ranks=RankSizes())  # the files are those of one rank, whoever wrote them
    states = sum(part.bytes for part in state_parts(facts, s)[1 if s.adapter else 0 :])
    parts = [
        Part("final model", facts.parameters * s.compute_bytes if not s.adapter else s.adapter * 4, "disk", "weights as saved")
    ]
    if checkpoints:
        formula = "weights and optimizer, streamed in 64 MiB pieces"
        name = "1 checkpoint" if checkpoints == 1 else f"{checkpoints} checkpoints"
        parts.append(Part(name, checkpoints * states, "disk", formula))
    return parts
