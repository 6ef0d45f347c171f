"""The sentences of a plan: what layers keep and why, where states lie, and all of it in one line.

A plan that cannot say why it keeps a third of the outputs is not believed, and a user who is short of memory wants to know what
the shortage costs: an output that is computed again is 13 s of a layer at a million tokens, an input 1.2 s.
"""

from __future__ import annotations

from dataclasses import replace

from megaspan.human import format_bytes, format_seconds, format_tokens
from megaspan.plan.cost import Memory, memory
from megaspan.plan.facts import ModelFacts
from megaspan.plan.keep import KeepPolicy, LayerKeep, Place
from megaspan.plan.parts import Settings
from megaspan.plan.seconds import relative_seconds
from megaspan.plan.states import Faster
from megaspan.plan.streamed import input_bytes, output_bytes
from megaspan.plan.weights import gradients_pass, link_bytes, whole_gradients

RATED = "an H200"
"""The GPU whose rates are known."""
_WHERE: dict[Place, str] = {"device": "on the device", "host": "on the host", "disk": "on disk"}


def where(place: Place) -> str:
    """A place in words."""
    return _WHERE[place]


def packed_reason(facts: ModelFacts, s: Settings) -> str | None:
    """What is said of rows of several documents that do not see each other; None where there are none."""
    if s.packed is not None:
        return (
            f"the row with most attention holds {s.packed.documents:,} documents that do not see each other: seconds are those "
            "of their lengths, bytes those of a row of one document, which holds no less"
        )
    if not s.packs:
        return None
    windows = " (of layers with windows as if they saw all keys)" if s.ranks.cp > 1 and facts.window else ""
    return (
        f"rows will hold several documents: bytes and seconds are those of a row of one document, which holds no less{windows}"
        ", and takes longer (a run counts the seconds of its rows when they are there)"
    )


def layer_reasons(facts: ModelFacts, s: Settings, used: Memory) -> list[str]:
    """Why tiles, head groups and the keep policy are what they are."""
    reasons = []
    if not s.streamed:
        reasons.append("layers of this family are checkpointed whole: the streamed layer is not proven for them")
        if s.tiled_mlp:
            reasons.append(
                f"their MLP runs in tiles of {format_tokens(s.layer_tile)} tokens: whole it has no room. The live model is "
                "tried, and the run says where an MLP does not work token by token"
            )
    elif s.layer_tile < s.tokens:
        reasons.append(f"layers run in tiles of {format_tokens(s.layer_tile)} tokens, attention over the whole row")
    if s.streams and s.kv_heads_per_call:
        shares = "what ranks exchange for the next ones travels meanwhile" if s.ranks.row > 1 else "all at once have no room"
        reasons.append(
            f"attention takes {s.kv_heads_per_call} of {facts.kv_heads} KV heads a call, with what they need of q, k, v, "
            f"gradients and sums: {shares}"
        )
    if s.streams and s.stream_back:
        reasons.append("what waits on the host comes back tile by tile: the next layer's whole row has no room beside it")
        if s.project_ahead:
            reasons.append("q, k, v of the next heads are made of it while these are attended: attention hides the copies")
    return reasons + _keep_reasons(facts, s, used)


def _keep_reasons(facts: ModelFacts, s: Settings, used: Memory) -> list[str]:
    reasons, policy = [], s.policy(facts.layers)
    given_up = facts.layers - policy.outputs
    if s.streams and given_up:
        kept = f"{policy.outputs} of {facts.layers} layers keep" if policy.outputs else "no layer keeps"
        reasons.append(f"{kept} attention's output, for want of room; where it is not kept, attention runs forward twice")
    if s.streams and policy.runs_again:
        reasons.append(
            f"{len(policy.segments)} layers keep their input, in segments of {_lengths(policy)} layers from the bottom: the "
            f"others' are computed again, {policy.runs_again} layers' token-wise work, and wait {where(policy.again)} then"
        )
    if "disk" in policy.places:
        reasons.append(f"{format_bytes(used.disk_bytes)} wait on disk, of the lowest layers: they wait longest")
    if not (s.offload and s.gpu):
        return reasons
    stay = policy.keep_on_device
    if not any(place != "device" for place in policy.places):
        reasons.append(
            f"offload moves nothing: what all {facts.layers} layers keep fits where gradients "
            f"({format_bytes(whole_gradients(facts, s))}) or others come later"
            if not given_up
            else "offload moves nothing: what is kept stays on the device"
        )
    elif stay:
        last, one = (f"{stay} layers", "") if stay > 1 else ("layer", "s")
        everything = replace(s, keep=KeepPolicy.everything(facts.layers, "host", outputs=s.streams))
        if used.device_bytes > memory(facts, everything).device_bytes:
            away = format_bytes(memory(facts, everything).host_bytes)
            reasons.append(
                f"what the last {last} keep{one} stays on the device for want of host memory: all of it away would take "
                f"{away} of host memory (host_memory says what there is)"
            )
        else:
            reasons.append(f"what the last {last} keep{one} stays on the device: others need its place only later")
    return reasons


def state_reasons(facts: ModelFacts, s: Settings, faster: Faster | None = None) -> list[str]:
    """Why gradients and optimizer states lie where they do.

    Args:
        facts: the model.
        s: the levers.
        faster: what it gains that they are not where it is simplest; None where they are, or nothing else fits.
    """
    reasons = []
    beside, crossing = (size / 53e9 for size in link_bytes(facts, s))
    gained = _gained(facts, s, faster) if faster else ""
    if s.states.gradients == "update":
        reasons.append(
            "parameters are updated in the backward, gradients dropped at once: nothing is clipped, it costs nothing"
        )
    if s.states.gradients == "host" and s.gpu:
        what = "gradients wait on the host for the norm of all of them"
        if s.rows > 1:
            what = f"the sum of {s.rows} rows' gradients waits on the host, and comes back to be added to"
        copies = f"{beside:.2g} s of copies beside the backward"
        if s.rows > 1:
            copies = f"{2 * beside:.2g} s that each backward waits for"
        chosen = faster is not None and faster.than.gradients != "host"
        why = gained if chosen else "on the device there is no room"
        reasons.append(f"{what} ({copies}): {why}")
        gained = "" if chosen else gained
    if s.states.moments == "host":
        masters = "fp32 masters and moments" if s.masters else "moments"
        why = f": {gained}" if gained else ""
        reasons.append(f"AdamW's {masters} lie on the host and pass the device in pieces, {crossing:.2g} s each way{why}")
    if s.rows > 1 and not s.adapter and not gradients_pass(s):
        reasons.append(f"gradients of a window's {s.rows} rows are summed: they are there in every moment but the first row's")
    return reasons


def _gained(facts: ModelFacts, s: Settings, faster: Faster) -> str:
    """Seconds for which states were moved that had room elsewhere."""
    both = s.states.moved - faster.than.moved == 2
    where = "with both on the device" if both else "with them on the device"
    if faster.than.moved == 1:
        where += f", and {'gradients' if faster.than.gradients == 'host' else 'moments'} on the host"
    size = f"{format_seconds(faster.seconds)} a step faster on {RATED}" if _rated(facts, s) else "a step is faster"
    return f"{size} than {where}, as layers have more room"


def _rated(facts: ModelFacts, s: Settings) -> bool:
    """Seconds can be told: rates are those of an H200, in bf16 and at head size 128 (plan/seconds.py)."""
    return s.gpu and s.compute_bytes == 2 and facts.head_dim == 128


def _lengths(policy: KeepPolicy) -> str:
    return ", ".join(str(len(segment)) for segment in policy.segments)


def summary(facts: ModelFacts, s: Settings) -> str:
    """What was chosen and why, in one sentence."""
    policy, layers = s.policy(facts.layers), facts.layers
    if not s.checkpoint:
        return "every layer keeps all it computed: checkpointing is off"
    found = [where(place) for place in _WHERE if place in policy.places]
    places = found[0] if len(found) == 1 else f"({', '.join(f'some {place}' for place in found)})"
    if not s.streams:
        return f"all {layers} layers keep their input {places} and run whole again in the backward"
    moved = {"host": "gradients wait on the host", "update": "updates happen in the backward", "device": ""}[s.states.gradients]
    states = [moved] if moved else []
    if s.states.moments == "host":
        states.append("the optimizer's states lie on the host")
    also = f"; {', '.join(states)}" if states else ""
    if policy.outputs == layers and not policy.runs_again:
        return f"every layer keeps its input and attention's output {places}: attention runs forward once{also}"
    full = replace(s, keep=KeepPolicy.everything(layers, "host"))
    more = max(0.0, relative_seconds(facts, s) - relative_seconds(facts, full))
    again = f"takes {format_seconds(more)} on {RATED}" if _rated(facts, s) else "is computed"
    kept = f"{len(policy.segments)} inputs and {policy.outputs} attention outputs of {layers} layers are kept {places}"
    return f"{kept} for want of room; the rest, again, {again}{also}"


def keep_rows(facts: ModelFacts, s: Settings) -> list[tuple[str, str, int, str]]:
    """The table of what is kept: layers, what, bytes, why; equal neighbours in one row, a segment's start with its rest."""
    policy, x, out = s.policy(facts.layers), input_bytes(facts, s), output_bytes(facts, s)
    rows = []
    for group in _groups(policy):
        layers = range(group[0].start, group[-1].stop)
        kept = [policy.layers[layer] for layer in layers]
        size = sum(x * (keep.input is not None) + out * (keep.output is not None) for keep in kept)
        rows.append((_named(group), _what(kept, group), size, _why(kept, group, policy, s)))
    return rows


def _groups(policy: KeepPolicy) -> list[list[range]]:
    """Neighbouring segments that keep the same."""

    def same(segment: range) -> tuple[LayerKeep, ...]:
        return tuple(policy.layers[layer] for layer in segment)

    groups: list[list[range]] = []
    for segment in policy.segments:
        if groups and same(groups[-1][-1]) == same(segment):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def _named(group: list[range]) -> str:
    first, last = group[0].start + 1, group[-1].stop
    name = f"layers {first}-{last}" if last > first else f"layer {first}"
    return f"{name}, {len(group)} segments of {len(group[0])}" if len(group) > 1 and len(group[0]) > 1 else name


def _what(kept: list[LayerKeep], group: list[range]) -> str:
    start, length = kept[0], len(group[0])
    assert start.input is not None
    first = "input"
    if length > 1:
        first = f"input of layer {group[0].start + 1}" if len(group) == 1 else "input of the first of each"
    words = [f"{first} {where(start.input)}"]
    outputs = [keep.output for keep in kept[:length]]
    for place in _WHERE:
        if count := outputs.count(place):
            name = "attention's output" if length == 1 else "1 attention output" if count == 1 else f"{count} attention outputs"
            words.append(f"{name} {where(place)}")
    return ", ".join(words) + (", the rest computed again" if length > 1 or None in outputs else "")


def _why(kept: list[LayerKeep], group: list[range], policy: KeepPolicy, s: Settings) -> str:
    if not s.streams:
        return "checkpointed whole"
    length = len(group[0])
    if length > 1:
        return f"run again once in the backward, waiting {where(policy.again)}"
    if kept[0].output is None:
        return "attention runs forward again in the backward"
    return "nothing is computed twice but tiles"
