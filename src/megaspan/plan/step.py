"""The pieces of a step that do not depend on what layers keep: computed once, and shared by all policies that are tried.

A search looks at a hundred keep policies with the same tiles and head groups. A layer's work, the loss, states and gradients
are the same under each of them, and most of a plan's arithmetic.

Letters: t tokens, E hidden, Q = heads x head size, F MLP width, c bytes of the computation's type (2 for bf16).
"""

from __future__ import annotations

from dataclasses import replace

from megaspan.human import count_of, format_bytes
from megaspan.plan.facts import ModelFacts
from megaspan.plan.keep import KeepPolicy
from megaspan.plan.layer import layer_bytes, whole_layer_parts
from megaspan.plan.logits import loss_parts, position_part
from megaspan.plan.over_ranks import embedding_gradient, gathered_head, gathered_weights, going_gradient
from megaspan.plan.parts import Part, Settings
from megaspan.plan.streamed import (
    Output,
    Phase,
    aside_bytes,
    backward_phases,
    forward_parts,
    input_bytes,
    output_bytes,
    tile_bytes,
)
from megaspan.plan.weights import gradient_part, gradients_pass, host_gradients, state_parts

CONTEXT_BYTES = 768 * 2**20  # CUDA context, cuBLAS and attention workspaces
HOST_BASE_BYTES = 4 * 2**30  # Python, torch and the CUDA libraries of one process
CPU_BASE_BYTES = 2**30
_PROCESS = "Python, torch, CUDA libraries: allowance"
SLACK = 0.02  # allocator rounding with expandable segments

Pair = tuple[int, int]
"""How many inputs, and how many outputs, of layers."""


class Step:
    """One step with given dials.

    Args:
        facts: the model.
        s: the levers; what they say of layers (`keep`) is not looked at.

    Attributes:
        input, output: bytes of one layer's input, and of attention's output with its log-sum-exp.
        tiles: what waits elsewhere comes back tile by tile.
        always: where the computation is, all the time: states and tables.
        on_host: beside a GPU, all the time: states that lie on the host, and the process.
        base: what is there beside tensors, whatever their size.
        earlier: before the backward: gradients of a window's earlier rows.
        loss: the loss.
        phases: a layer's backward, without what it kept.
        heaviest: the phase that needs most.
        embedding: the end of the backward, where the embedding's gradient is whole on every rank; empty where no
            weight is sharded.
    """

    def __init__(self, facts: ModelFacts, s: Settings) -> None:
        self.facts, self.s = facts, s
        self.input, self.output = input_bytes(facts, s), output_bytes(facts, s)
        self.tiles = s.stream_back and s.streams
        states = state_parts(facts, s)
        here = [part for part in states if part.place == s.place]
        self.always = [*here, *gathered_weights(facts, s), position_part(facts, s), *self._routing]
        self.on_host = [part for part in states if part.place == "host"] if s.gpu else []
        self.base = Part("process", CPU_BASE_BYTES, "host", "Python and torch: allowance")
        if s.gpu:
            self.on_host += [host_gradients(facts, s), Part("process", HOST_BASE_BYTES, "host", _PROCESS)]
            self.base = Part("CUDA context", CONTEXT_BYTES, "device", "driver and workspaces: allowance")
            if aside := aside_bytes(facts, s):
                formula = f"and {format_bytes(aside)} of tiles on a stream of their own"
                self.base = self.base._replace(bytes=CONTEXT_BYTES + aside, formula=f"{self.base.formula}, {formula}")
        self._gradients: dict[int, Part] = {}
        self._forward: dict[bool, list[Part]] = {}
        self._again: dict[tuple[bool, int], list[Part]] = {}
        self.earlier = [self.gradient(0)] if s.rows > 1 and not gradients_pass(s) else []
        self.loss = [*loss_parts(facts, s), *gathered_head(facts, s)]
        self.embedding = embedding_gradient(facts, s) if s.ranks.shard > 1 and not s.adapter else []
        self._sparse = facts.experts.sparse_layers if facts.experts else (False,) * facts.layers
        self._kinds = {kind: layer_bytes(facts, self._sparse.index(kind), s) for kind in set(self._sparse)}
        self._layer = max(self._kinds.values(), key=lambda kind: kind.peak)
        self.phases = self._phases()
        self.heaviest = max(self.phases, key=lambda phase: phase.bytes)

    @property
    def _routing(self) -> list[Part]:
        """The choices of experts, kept from the forward of streamed layers: a byte or two for each."""
        experts, s = self.facts.experts, self.s
        if experts is None or not s.streams:
            return []
        each, sparse = experts.active * (1 if experts.count <= 256 else 2), sum(experts.sparse_layers)
        return [Part("choices of experts", s.slots * sparse * each, s.place, f"{sparse} layers x t x {each} B")]

    def gradient(self, layers_done: int) -> Part:
        """Gradients on the device when the backward has passed the last `layers_done` layers, and the head."""
        done = min(layers_done, 1) if gradients_pass(self.s) else layers_done  # those that pass are one layer's everywhere
        if done not in self._gradients:
            self._gradients[done] = gradient_part(self.facts, self.s, done)
        return self._gradients[done]

    def _phases(self) -> tuple[Phase, ...]:
        facts, s, layer = self.facts, self.s, self._layer
        going = tuple(going_gradient(facts, s))
        if s.streams:
            phases = backward_phases(facts, layer, s, max(facts.layer_parameters))
            return tuple(replace(phase, parts=(*phase.parts, *going)) for phase in phases) if going else phases
        if s.checkpoint:
            return (Phase("", (*whole_layer_parts(facts, layer, s), *going)),)
        extra = layer.mlp_backward if layer.mlp_is_peak else max(0, layer.attention_backward - layer.mlp)
        return (Phase("", (Part("gradients inside a layer", s.slots * extra, s.place, "of the layer that runs"),)),)

    def forward(self, policy: KeepPolicy) -> list[Part]:
        """A layer's forward, with its own input and output."""
        # Read back in tiles, output leaves head group by head group where every layer's is kept elsewhere.
        leaves = self.tiles and all(keep.output in ("host", "disk") for keep in policy.layers)
        if leaves not in self._forward:
            self._forward[leaves] = self._forward_parts("leaves" if leaves else "whole")
        return self._forward[leaves]

    def _forward_parts(self, output: Output) -> list[Part]:
        if self.s.streams:
            return forward_parts(self.facts, self._layer, self.s, output)
        t, c = self.s.slots, self.s.compute_bytes
        size = t * 3 * c * self.facts.active_mlp_width
        return [Part("one layer without gradients", size, self.s.place, f"t x 3·{c}·F")]

    def again(self, policy: KeepPolicy, segment: range) -> list[Part]:
        """A layer of a segment that runs again, beside all that the segment stores.

        Stored on the device, its input and output are the last two inputs of the segment. Only of two layers one has an input
        that is not stored: the one that the segment begins with, which is fetched whole unless it is on the device.
        """
        here, whole = policy.again == "device", policy.layers[segment.start].input == "device"
        return self.again_in(here, (1 + (len(segment) == 2 and not whole)) if here else 3 - (len(segment) == 2 and whole))

    def again_in(self, here: bool, rows: int) -> list[Part]:
        """The same with so many inputs, outputs and gradients, for segments stored on the device (`here`) or elsewhere."""
        if (here, rows) not in self._again:
            output: Output = "stored" if here else "leaves" if self.tiles else "whole"
            parts = forward_parts(self.facts, self._layer, self.s, output, rows, again=True)
            if self.s.ranks.shard > 1:  # beside those of the layer at work and of the one before
                size = max(self.facts.layer_parameters) * self.s.compute_bytes
                parts.append(Part("weights of the layer that runs again, gathered", size, self.s.place, "one layer's"))
            self._again[here, rows] = parts
        return self._again[here, rows]

    def kept(self, inputs: int, outputs: int) -> list[Part]:
        """So many inputs and outputs that stay on the device."""
        s = self.s
        return [
            Part("layer inputs kept", inputs * self.input, s.place, f"{layers_of(inputs)} x t x E x {s.compute_bytes} B"),
            Part(
                "attention outputs kept",
                outputs * self.output,
                s.place,
                f"{layers_of(outputs)} x t x (Q x {s.compute_bytes} + H x 4) B",
            ),
        ]

    def activations(self, layers: int) -> Part:
        """All that the lowest layers computed, where nothing is checkpointed."""
        size = sum(self._kinds[kind].kept for kind in self._sparse[:layers])
        size = self.s.slots * size + layers * self.input
        return Part("activations of all layers", size, self.s.place, f"{layers} layers, nothing is recomputed")

    def fetched(self, phase: Phase, policy: KeepPolicy, index: int) -> int:
        """Bytes on the device that are not kept there: of the layer at work, and whole those of the one below.

        What comes in tiles is two tiles; an output that was just attended, and waits on the device, is whole.
        """
        layers, segment, uses = policy.layers, policy.segment_of[index], phase.uses_output
        inputs = outputs = 0
        for layer in range(index if self.tiles else max(0, index - 1), index + 1):
            if layer < segment.start and layers[layer].input is None:
                continue  # its segment runs again first
            again = policy.again if layer in segment else None
            inputs += ((layers[layer].input or again) or "device") != "device"
            where = layers[layer].output or (again if layer != segment[-1] else None)
            attends = layer == index and where is None  # its output is on the device, wherever it waits
            outputs += (attends or (where or "device") != "device") and (uses or layer != index)
        if not self.tiles:
            return inputs * self.input + outputs * self.output
        x, out = tile_bytes(self.facts, self.s, phase.name)
        return inputs * x + outputs * (self.output if attends and policy.attends == "device" else out)

    def allowed(self, limit: int) -> int:
        """The most bytes for which, with their overhead, the limit is kept."""
        return int((limit - self.base.bytes - 1) / (1 + SLACK))


def slack_of(size: int) -> int:
    """What rounding takes beside `size` bytes of tensors."""
    return round(SLACK * size)


def layers_of(count: int) -> str:
    """A number of layers in words."""
    return count_of(count, "layer")
