"""Bytes of a training step as pure arithmetic, every number with the formula it came from.

What is modelled is what runs: layers streamed in tiles or checkpointed whole, what they keep on the device, in host memory or
on disk, segments that run again, the loss in tiles, AdamW. Anchors: layer inputs that others reported (28 layers x 131,072 x
1,024: 7.52 GB), and peaks of whole checkpointed layers measured on one H200 (4B shape in pure bf16, 32k to 131k tokens), which
these formulas meet within 2 %.

Letters: t tokens, E hidden, Q = heads x head size, V vocabulary, c bytes of the computation's type (2 for bf16).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from megaspan.human import count_of, format_tokens
from megaspan.plan.facts import ModelFacts
from megaspan.plan.keep import KeepPolicy, Place
from megaspan.plan.layer import LayerBytes, layer_bytes, whole_layer_parts
from megaspan.plan.logits import loss_parts, position_part
from megaspan.plan.logits import loss_tile as loss_tile
from megaspan.plan.over_ranks import embedding_gradient, gathered_head, gathered_weights, going_gradient
from megaspan.plan.parts import Part, Settings
from megaspan.plan.ranks import RankSizes
from megaspan.plan.segments import held_bytes
from megaspan.plan.streamed import Phase, backward_phases, forward_parts, input_bytes, output_bytes, tile_bytes
from megaspan.plan.weights import gradient_part, host_gradients, state_parts, update_part

CONTEXT_BYTES = 768 * 2**20  # CUDA context, cuBLAS and attention workspaces
HOST_BASE_BYTES = 4 * 2**30  # Python, torch and the CUDA libraries of one process
CPU_BASE_BYTES = 2**30
KEPT = ("layer inputs", "attention outputs", "layers run again", "on the way to and from disk")  # by layers, on the host
SLACK = 0.02  # allocator rounding with expandable segments


@dataclass(frozen=True)
class Moment:
    """A moment of the step with everything that is on the device then (on the CPU: in host memory).

    Attributes:
        name: in words.
        parts: its tensors.
        beside: context, process and slack.
    """

    name: str
    parts: tuple[Part, ...]
    beside: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the tensors: what an allocator calls its peak."""
        return sum(part.bytes for part in self.parts)

    @property
    def needed(self) -> int:
        """With what lies beside them: what has to be there."""
        return self.bytes + sum(part.bytes for part in self.beside)


@dataclass(frozen=True)
class Memory:
    """All moments of a step, and what lies elsewhere all the time."""

    moments: tuple[Moment, ...]
    waiting: tuple[Part, ...]
    gpu: bool

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


class Step:
    """The pieces of a step that do not depend on what layers keep, each computed once.

    Args:
        facts: the model.
        s: the levers.
    """

    def __init__(self, facts: ModelFacts, s: Settings) -> None:
        self.facts, self.s = facts, s
        self.input, self.output = input_bytes(facts, s), output_bytes(facts, s)

    @cached_property
    def always(self) -> list[Part]:
        """States where the computation is, and tables."""
        here = [part for part in state_parts(self.facts, self.s) if part.place == self.s.place]
        return [*here, *gathered_weights(self.facts, self.s), position_part(self.facts, self.s), *self.routing]

    @property
    def routing(self) -> list[Part]:
        """The choices of experts, kept from the forward of streamed layers: a byte or two for each."""
        experts, s = self.facts.experts, self.s
        if experts is None or not s.streams:
            return []
        each, sparse = experts.active * (1 if experts.count <= 256 else 2), sum(experts.sparse_layers)
        return [Part("choices of experts", s.slots * sparse * each, s.place, f"{sparse} layers x t x {each} B")]

    @cached_property
    def layer(self) -> LayerBytes:
        """The layer that needs most when it runs whole."""
        sparse = self.facts.experts.sparse_layers if self.facts.experts else (False,)
        kinds = [layer_bytes(self.facts, sparse.index(kind), self.s) for kind in set(sparse)]
        return max(kinds, key=lambda kind: kind.peak)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """A layer's backward, without what it kept."""
        if self.s.streams:
            phases = backward_phases(self.facts, self.layer, self.s, max(self.facts.layer_parameters))
            going = tuple(going_gradient(self.facts, self.s))
            return tuple(replace(phase, parts=(*phase.parts, *going)) for phase in phases)
        if self.s.checkpoint:
            parts = (*whole_layer_parts(self.facts, self.layer, self.s), *going_gradient(self.facts, self.s))
            return (Phase("", parts),)
        extra = self.layer.mlp_backward
        if not self.layer.mlp_is_peak:
            extra = max(0, self.layer.attention_backward - self.layer.mlp)
        return (Phase("", (Part("gradients inside a layer", self.s.slots * extra, self.s.place, "of the layer that runs"),)),)

    @cached_property
    def forward(self) -> list[Part]:
        """A layer's forward, with its own input and output."""
        if self.s.streams:
            return forward_parts(self.facts, self.s)
        t, c = self.s.slots, self.s.compute_bytes
        size = t * 3 * c * self.facts.active_mlp_width
        return [Part("one layer without gradients", size, self.s.place, f"t x 3·{c}·F")]

    @cached_property
    def again(self) -> list[Part]:
        """A layer of a segment that runs again."""
        return forward_parts(self.facts, self.s, again=True)

    @cached_property
    def loss(self) -> list[Part]:
        """The loss."""
        return [*loss_parts(self.facts, self.s), *gathered_head(self.facts, self.s)]

    @cached_property
    def embedding(self) -> list[Part]:
        """The end of the backward, where the embedding's gradient is whole on every rank; empty where nothing is sharded."""
        return embedding_gradient(self.facts, self.s) if self.s.ranks.shard > 1 and not self.s.adapter else []

    @cached_property
    def earlier(self) -> list[Part]:
        """Before the backward: gradients of a window's earlier rows."""
        return [gradient_part(self.facts, self.s, 0)] if self.s.rows > 1 else []

    def fetched(self, phase: Phase, policy: KeepPolicy, index: int) -> tuple[int, int]:
        """Inputs and outputs on the device that are not kept there: of the layer at work, and whole those of the one below.

        Bytes of both. What comes in tiles is two tiles.
        """
        layers, s = policy.layers, self.s
        uses = phase.uses_output
        if s.stream_back and s.streams:
            x, out = tile_bytes(self.facts, s, phase.name)
            return (x if layers[index].input != "device" else 0), (out if layers[index].output != "device" else 0)
        again = next(segment for segment in policy.segments if index in segment)
        inputs = outputs = 0
        for layer in range(max(0, index - 1), index + 1):
            stored = policy.again if layer in again else None
            inputs += ((layers[layer].input or stored) or "device") != "device"
            where = layers[layer].output or (stored if layer != again[-1] else None)
            if layer == index and layers[layer].output is None and layer == again[-1]:
                where = "host"  # attention runs again: the output is on the device, and kept nowhere
            outputs += (where or "device") != "device" and (uses or layer != index)
        return inputs * self.input, outputs * self.output

    def beside(self, size: int) -> tuple[Part, ...]:
        """Context and rounding beside `size` bytes of tensors."""
        slack = Part("slack", round(SLACK * size), self.s.place, f"allowance: {SLACK:.0%} of the tensors")
        if self.s.gpu:
            return Part("CUDA context", CONTEXT_BYTES, "device", "driver and workspaces: allowance"), slack
        return Part("process", CPU_BASE_BYTES, "host", "Python and torch: allowance"), slack

    def allowed(self, limit: int) -> int:
        """The most bytes for which, with their overhead, the limit is kept."""
        base = CONTEXT_BYTES if self.s.gpu else CPU_BASE_BYTES
        return int((limit - base - 1) / (1 + SLACK))


def attends_on(s: Settings) -> Place | None:
    """Where the output of a layer that attends again waits for its backward: on the host when that is read in tiles."""
    return "host" if s.stream_back and s.streams else None


def memory(facts: ModelFacts, s: Settings) -> Memory:
    """Every moment of a step from the second on, when the optimizer's state exists."""
    step, policy, total = Step(facts, s), s.policy(facts.layers), facts.layers
    moments = [
        ("forward", [*step.earlier, *_kept(step, policy, max(0, total - 1) if s.streams else total), *step.forward]),
        ("loss", [*step.earlier, *_kept(step, policy, total), *_flying(step, policy), *step.loss]),
    ]
    for index in _telling_layers(step, policy):
        for phase in step.phases:
            name = f"backward of layer {index + 1}" + (f", {phase.name}" if phase.name else "")
            moments.append((name, _backward(step, policy, index, phase)))
    if s.streams:
        for segment in policy.segments:
            if len(segment) > 1:
                done = gradient_part(facts, s, total - segment.stop)
                held = [*_kept(step, policy, segment.stop), *_stored(step, policy, segment, segment.stop)]
                moments.append((f"layers {segment[0] + 1} to {segment[-1] + 1} again", [done, *held, *step.again]))
    if step.embedding:
        moments.append(("backward of the embedding", [gradient_part(facts, s, total), *step.embedding]))
    moments.append(("optimizer", [gradient_part(facts, s, total), update_part(facts, s)]))
    made = []
    for name, parts in moments:
        whole = tuple(part for part in [*step.always, *parts] if part.bytes)
        made.append(Moment(name, whole, step.beside(sum(part.bytes for part in whole))))
    return Memory(tuple(made), waiting_parts(facts, s), s.gpu)


def _backward(step: Step, policy: KeepPolicy, index: int, phase: Phase) -> list[Part]:
    """One phase of one layer's backward. A checkpointed layer's gradients are part of its work until it is done."""
    s, total = step.s, step.facts.layers
    gradients = gradient_part(step.facts, s, total - index - 1 if s.checkpoint else total - index)
    if not s.checkpoint:
        return [gradients, *_kept(step, policy, index + 1), *phase.parts]
    segment = next(each for each in policy.segments if index in each)
    parts = [gradients, *_kept(step, policy, index + 1, gone=index if not phase.uses_output else None)]
    parts += _stored(step, policy, segment, index + 1)
    inputs, outputs = step.fetched(phase, policy, index)
    ahead = "of two tiles" if s.stream_back else "of this layer, and of the one below"
    parts.append(Part("inputs and outputs fetched", inputs + outputs, s.place, f"{ahead}; an input is t x E, an output t x Q"))
    return [*parts, *phase.parts]


def _kept(step: Step, policy: KeepPolicy, layers: int, gone: int | None = None) -> list[Part]:
    """What the lowest layers keep on the device; with everything kept, all they computed. `gone` lets go of its output."""
    s, place = step.s, step.s.place
    if not s.checkpoint:
        sparse = step.facts.experts.sparse_layers if step.facts.experts else (False,) * step.facts.layers
        each = {kind: layer_bytes(step.facts, sparse.index(kind), s).kept for kind in set(sparse)}
        size = s.slots * sum(each[kind] for kind in sparse[:layers]) + layers * step.input
        return [Part("activations of all layers", size, place, f"{layers} layers, nothing is recomputed")]
    inputs, outputs = policy.below["device"][layers]
    if gone is not None and policy.layers[gone].output == "device":
        outputs -= 1
    return [
        Part("layer inputs kept", inputs * step.input, place, f"{_layers(inputs)} x t x E x {s.compute_bytes} B"),
        Part(
            "attention outputs kept",
            outputs * step.output,
            place,
            f"{_layers(outputs)} x t x (Q x {s.compute_bytes} + H x 4) B",
        ),
    ]


def _layers(count: int) -> str:
    return count_of(count, "layer")


def _stored(step: Step, policy: KeepPolicy, segment: range, stop: int) -> list[Part]:
    """What a segment that was run again has on the device, of its layers below `stop`."""
    if policy.again != "device" or len(segment) == 1:
        return []
    inputs = stop - segment.start - 1
    outputs = sum(policy.layers[index].output is None for index in range(segment.start, min(stop, segment.stop - 1)))
    size = inputs * step.input + outputs * step.output
    return [Part("layers run again", size, step.s.place, f"{inputs} inputs, {outputs} outputs of a segment")]


def _flying(step: Step, policy: KeepPolicy) -> list[Part]:
    """At the loss: what the last layers sent to the host, of which the device lets go when the next attention begins."""
    s, last = step.s, policy.layers[-2:] if not step.s.streams else policy.layers[-1:]
    if not s.checkpoint or (s.stream_back and s.streams):
        return []
    inputs = sum(layer.input not in ("device", None) for layer in last)
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
    inside = [index for index in corners if 0 <= index < total]
    heaviest = max(step.phases, key=lambda phase: phase.bytes)

    def size(index: int) -> int:
        return sum(part.bytes for part in _backward(step, policy, index, heaviest))

    return tuple(sorted({total - 1, 0, max(inside, key=size)}, reverse=True))


def waiting_parts(facts: ModelFacts, s: Settings) -> tuple[Part, ...]:
    """What lies in host memory or on disk beside the computation, at the worst moment."""
    policy, x, out = s.policy(facts.layers), input_bytes(facts, s), output_bytes(facts, s)
    parts, pinned = [], ", pinned" if s.gpu else ""
    if s.checkpoint:
        row = f"{format_tokens(s.slots)} tokens x"
        places: tuple[tuple[Place, str], ...] = (("host", pinned), ("disk", " on disk"))
        for place, where in places:
            inputs, outputs = policy.below[place][-1]
            wide = f"({facts.query_width:,} x {s.compute_bytes} + {facts.heads} x 4) B"
            parts += [
                Part(
                    f"layer inputs{where}",
                    inputs * x,
                    place,
                    f"{_layers(inputs)} x {row} {facts.hidden:,} x {s.compute_bytes} B",
                ),
                Part(f"attention outputs{where}", outputs * out, place, f"{_layers(outputs)} x {row} {wide}"),
            ]
        held = list(held_bytes(policy, x, out, "host", attends_on(s)))
        formula = "more than all of the above, when a segment has run again and those above it are gone"
        parts.append(Part(f"layers run again{pinned}", max(held) - held[0], "host", formula))
        staged = staged_bytes(facts, s) if "disk" in policy.places else 0
        parts.append(Part("on the way to and from disk", staged, "host", "2 layers x (input and output)"))
    if s.gpu:
        parts += [part for part in state_parts(facts, s) if part.place == "host"]
        parts.append(host_gradients(facts, s))
        parts.append(Part("process", HOST_BASE_BYTES, "host", "Python, torch, CUDA libraries: allowance"))
    return tuple(part for part in parts if part.bytes)


def staged_bytes(facts: ModelFacts, s: Settings) -> int:
    """Host memory through which what lies on disk passes: one layer coming while another is read."""
    return 2 * (input_bytes(facts, s) + output_bytes(facts, s))


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
