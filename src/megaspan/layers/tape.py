"""What the layers of one row keep between forward and backward, where it waits, and how it comes back.

A streamed layer keeps its input and attention's output: 8.6 GB each a layer at 1,048,576 tokens of an 8B model, 618 GB in all.
The keep policy says for each layer and each of the two whether it stays on the device, waits on the host or on disk, or is
computed again.
An input that is not kept is computed again from the nearest earlier one that is: its segment is run forward once more in the
backward, and keeps its inputs then, when the layers above have let go of theirs. Where attention's output was kept, that second
run is token-wise work alone: 1.2 s of a layer's 55 at a million tokens, where attention would take 13.

A `Tape` is one forward of one row; it lives as long as the graph that holds it.

Source: Chen et al. 2016, arXiv 1604.06174 (segments); the policy itself is `plan/keep.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from megaspan.memory.arena import pages
from megaspan.memory.aside import Aside
from megaspan.memory.disk import DiskTier
from megaspan.memory.link import Link
from megaspan.memory.offload import STAGED_LAYERS, LayerInputs, OffloadStats
from megaspan.memory.saved import SavedInput
from megaspan.plan.keep import KeepPolicy, Place


@final
class Stores:
    """Where the layers of a model keep things: a store for each kind, inputs and outputs in the same host memory.

    Args:
        device: where the layers run.
        limit: most bytes of host memory in all, or None.
        shares: bytes of a layer's output and of its log-sum-exp for each byte of its input.
        disk: where things of the place "disk" wait; somebody else's, who closes it after this.
        groups: head groups of a layer, each of which keeps its own output.
    """

    def __init__(
        self,
        device: torch.device,
        limit: int | None = None,
        shares: tuple[float, float] = (1.0, 0.1),
        disk: DiskTier | None = None,
        groups: int = 1,
    ) -> None:
        self._shares, self._groups = shares, groups
        self._link = Link(device, limit=limit)
        # Sources are let go of when the next layer's attention begins: a long row has no room for two layers' copies.
        self.inputs, self.outputs = (
            LayerInputs(device, in_flight=None, disk=disk, staged=STAGED_LAYERS * pieces, link=self._link)
            for pieces in (1, groups)
        )
        # Thousand times smaller than the others: between them they would leave holes.
        self.sums = LayerInputs(device, limit=limit, in_flight=None, disk=disk, staged=STAGED_LAYERS * groups)

    @property
    def all(self) -> tuple[LayerInputs, LayerInputs, LayerInputs]:
        """The three stores."""
        return self.inputs, self.outputs, self.sums

    def start_row(self, input_bytes: int, policy: KeepPolicy) -> None:
        """A forward begins: room is made for all that will be on the host at once, in one piece.

        Raises:
            UserError: the host has not that much.
        """
        for store in self.all:
            store.start_row(1)
        sizes = self.sizes(input_bytes)
        self._link.make_room(1, most_bytes(policy, sizes[0], self._groups * sizes[1]))
        _, outputs = most_waiting(policy, "host")
        self.sums.start_row(max(1, outputs * self._groups))

    def sizes(self, input_bytes: int) -> tuple[int, int, int]:
        """Bytes of a layer's input, and of a head group's output and log-sum-exp, in whole pages."""
        output, sums = (-(-int(input_bytes * share) // self._groups) for share in self._shares)
        return pages(input_bytes), pages(output), pages(sums)

    def reserve(self, input_bytes: int, policy: KeepPolicy, rows: int = 1) -> None:
        """Gets (and on a GPU pins) host memory for `rows` rows at once, before step 1.

        Raises:
            UserError: the host has not that much, or it cannot be pinned.
        """
        inputs, outputs, sums = self.sizes(input_bytes)
        on_disk = most_waiting(policy, "disk")
        total = rows * most_bytes(policy, inputs, self._groups * outputs)
        if on_disk[0]:
            total += STAGED_LAYERS * inputs
        if on_disk[1]:
            total += STAGED_LAYERS * self._groups * outputs
        self._link.make_room(1, total)
        host = most_waiting(policy, "host")[1]
        for store, size, on_host, waiting in (
            (self.inputs, inputs, 0, on_disk[0]),
            (self.outputs, outputs, 0, on_disk[1]),
            (self.sums, sums, rows * host * self._groups, on_disk[1]),
        ):
            if size:
                store.reserve(on_host, size, waiting)

    def land(self) -> None:
        """Lets go of every source whose copy to the host has been queued; the device waits for the copies, not the host."""
        for store in self.all:
            store.land()

    def land_but_last(self) -> None:
        """The same, but for the input that was kept last: it is in use, and the device would wait for its copy."""
        self.inputs.land(1)
        self.outputs.land()
        self.sums.land()

    def discard(self) -> None:
        """Lets go of everything kept."""
        for store in self.all:
            store.discard()

    def close(self) -> None:
        """And frees the host memory."""
        for store in self.all:
            store.close()
        self._link.close()

    def wait(self, events: Sequence[Any]) -> None:
        """Makes the computing stream wait for them."""
        for event in events:
            self._link.stream.wait_event(event)

    @property
    def aside(self) -> Aside:
        """A stream beside the computing one."""
        return self._link.aside

    @property
    def used(self) -> int:
        """Bytes of host memory that something is in, staging for the disk included."""
        return self._link.arena.used + self.sums.arena.used

    def stats(self) -> dict[str, Any]:
        """The fields of `OffloadStats`, summed."""
        arena = self._link.arena
        shared = OffloadStats(host_bytes=arena.bytes, host_bytes_peak=arena.peak, seconds_pinning=arena.seconds_pinning)
        found = [vars(shared), *(vars(store.stats()) for store in self.all)]
        return {name: sum(each[name] for each in found) for name in vars(shared)}


@final
class Kept:
    """What one layer of one row keeps: its input, and of each head group attention's output and log-sum-exp.

    Args:
        stores: where.
        by_tiles: what waits on the host is read tile by tile and group by group, and stays there until `let_go`.
    """

    def __init__(self, stores: Stores, by_tiles: bool) -> None:
        self.stores, self._by_tiles = stores, by_tiles
        self.input: SavedInput | None = None
        self._outputs: list[SavedInput] = []
        self._sums: list[SavedInput] = []

    def keep_input(self, x_BTE: Tensor, place: Place) -> None:
        """Keeps the layer's input; the copy to the host starts at once."""
        self.input = self.stores.inputs.pack(x_BTE, place)

    def keep_output(self, out_BTHD: Tensor, lse_BHT: Tensor, place: Place) -> None:
        """Keeps attention's output for the next head group."""
        self._outputs.append(self.stores.outputs.pack(out_BTHD, place))
        self._sums.append(self.stores.sums.pack(lse_BHT, place))

    @property
    def has_outputs(self) -> bool:
        """Whether attention's output is here."""
        return bool(self._outputs)

    def prefetch(self) -> None:
        """Starts the copies back to the device, unless they come tile by tile."""
        if not self._by_tiles:
            if self.input is not None:
                self.stores.inputs.prefetch(self.input)
            for store, kept in ((self.stores.outputs, self._outputs), (self.stores.sums, self._sums)):
                for each in kept:
                    store.prefetch(each)

    def recall(self) -> None:
        """Starts the way from the disk to the host."""
        if self.input is not None:
            self.stores.inputs.recall(self.input)
        for store, kept in ((self.stores.outputs, self._outputs), (self.stores.sums, self._sums)):
            for each in kept:
                store.recall(each)

    def input_once(self) -> Tensor:
        """The whole input for one use; it stays kept where it is."""
        assert self.input is not None
        return self.stores.inputs.copy_of(self.input)

    def input_tiles(self, cuts: Sequence[slice]) -> Iterator[Tensor]:
        """The input in these tiles of tokens."""
        assert self.input is not None
        return self._tiles(self.stores.inputs, self.input, cuts)

    def output_tiles(self, cuts: Sequence[slice], *, passing: bool = False) -> Iterator[Tensor]:
        """Attention's output of all heads in these tiles of tokens; `passing`: it stays where it waits.

        A segment that runs again passes its layers' outputs. Brought to the device whole they would stay there until their own
        backwards: of ten layers of a 4B model at 524,288 tokens 40 GiB that nobody has planned.
        """
        outputs = self.stores.outputs
        groups = [outputs.tiles(each, cuts) if passing else self._tiles(outputs, each, cuts) for each in self._outputs]
        for _ in cuts:  # not `zip`, which holds one tile until it has the next
            yield next(groups[0]) if len(groups) == 1 else torch.cat([next(group) for group in groups], dim=2)

    @property
    def input_waits(self) -> bool:
        """Whether the input comes tile by tile from where it waits."""
        return self._by_tiles and self.input is not None and self.input.tensor is None

    def output_of(self, group: int, coming: list[Any] | None = None) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a head group for one use.

        With `coming` the computing stream waits for none that comes tile by tile: the events of their arrival are added.
        """
        found = (self.stores.outputs, self._outputs[group]), (self.stores.sums, self._sums[group])
        try:
            out, lse = (store.copy_of(saved, coming) if self._by_tiles else store.peek(saved) for store, saved in found)
        except BaseException:  # out of memory: whoever goes on may be given what is being made
            self.stores.wait(coming or ())
            raise
        return out, lse

    def let_go_of_outputs(self) -> None:
        """Attention's output is not needed any more."""
        for store, kept in ((self.stores.outputs, self._outputs), (self.stores.sums, self._sums)):
            for each in kept:
                store.release(each)
            store.land()  # one that was attended in this backward, and sent to the host, is held for its copy still
        self._outputs, self._sums = [], []

    def let_go(self) -> None:
        """Nothing is needed any more."""
        self.let_go_of_outputs()
        if self.input is not None:
            self.stores.inputs.release(self.input)

    def _tiles(self, store: LayerInputs, saved: SavedInput, cuts: Sequence[slice]) -> Iterator[Tensor]:
        if not self._by_tiles:
            store.peek(saved)  # a whole row a layer ahead: it is on its way
        return store.tiles(saved, cuts)


@final
class Tape:
    """One forward of one row through the streamed layers of a model.

    Args:
        policy: what each layer keeps.
        stores: where.
        by_tiles: see `Kept`.
        before_whole: layers behind which one runs that does not stream, and lets go of nothing here.
    """

    def __init__(self, policy: KeepPolicy, stores: Stores, by_tiles: bool, before_whole: frozenset[int] = frozenset()) -> None:
        self.policy, self.stores, self._by_tiles, self._before_whole = policy, stores, by_tiles, before_whole
        self._kept = [Kept(stores, by_tiles) for _ in policy.layers]
        self._forwards: list[Callable[[Tensor, Kept, Place | None], Tensor] | None] = [None] * len(policy.layers)
        self._last: tuple[int, weakref.ref[Tensor], int] | None = None
        self._begun = False

    def enter(self, index: int, x_BTE: Tensor, forward: Callable[[Tensor, Kept, Place | None], Tensor]) -> Kept:
        """A layer begins: keeps its input if the policy says so, or if it is not the output of the layer before.

        Args:
            index: of the layer.
            x_BTE: its input.
            forward: runs the layer outside any graph, keeping attention's output at a place, None for not at all.
        """
        if not self._begun:
            self.stores.start_row(x_BTE.nbytes, self.policy)
            self._begun = True
        place, kept = self.policy.layers[index].input, self._kept[index]
        self._forwards[index] = forward
        if place is None and not self._follows(index, x_BTE):
            place = self.policy.again  # something stands between the two layers, which a second run would leave out
        if place is not None:
            kept.keep_input(x_BTE, place)
        return kept

    def leave(self, index: int, y_BTE: Tensor) -> None:
        """A layer is done."""
        self._last = index, weakref.ref(y_BTE), y_BTE._version
        if index in self._before_whole or (self._by_tiles and index == len(self._kept) - 1):
            self.stores.land()  # the loss wants the room; otherwise the backward finds the last layer's still on the device

    def back_at(self, index: int, still_running: Callable[[], None]) -> Kept:
        """The backward reaches a layer: what it kept, its segment run forward once more if its input was not.

        Args:
            index: of the layer.
            still_running: called before each layer that is run again.

        Raises:
            RuntimeError: a second backward, or the step was abandoned.
        """
        kept = self._kept[index]
        self._recall(index)
        if kept.input is not None:
            kept.prefetch()  # before `land`: of the top layer it finds what the forward has left
        self.stores.land()
        if kept.input is None:
            start = self._start(index)
            x_BTE = self._kept[start].input_once()
            for number in range(start, index):
                still_running()
                self._kept[number + 1].recall()
                self.stores.land_but_last()
                forward, place = self._forwards[number], self.policy.again
                assert forward is not None
                x_BTE = forward(x_BTE, self._kept[number], place)
                self._kept[number + 1].keep_input(x_BTE, place)
            del x_BTE
            if self._by_tiles:
                self.stores.land()
            kept.prefetch()  # not sooner: the second run has no room for it, and nothing to hide 0.1 s behind is missed
        for before in range(index - 1, max(index - 3, -1), -1):
            if self._forwards[before] is None:
                break  # frozen layers below all trained ones have no backward
            self._recall(before)
            if before == index - 1 and self._kept[before].input is not None:
                self._kept[before].prefetch()  # where a segment runs again first, that has no room for its last output
        return kept

    def done(self, index: int) -> None:
        """The backward of a layer is over."""
        self._kept[index].let_go()
        self._forwards[index] = None

    def _start(self, index: int) -> int:
        """The layer where the second run of a layer's segment begins."""
        return next(number for number in range(index, -1, -1) if self._kept[number].input is not None)

    def _recall(self, index: int) -> None:
        """Starts the way from the disk of what the backward of a layer asks for first."""
        for number in (index, self._start(index)):
            self._kept[number].recall()

    def _follows(self, index: int, x_BTE: Tensor) -> bool:
        """Whether a layer's input is the very output of the layer before: the same memory, unchanged.

        The output must be alive still: memory that was let go of may have been given to something else.
        """
        before, output, version = self._last or (None, lambda: None, 0)
        y_BTE = output()
        return (
            before == index - 1
            and y_BTE is not None
            and y_BTE.data_ptr() == x_BTE.data_ptr()
            and y_BTE.shape == x_BTE.shape
            and y_BTE._version == version
        )


def most_waiting(policy: KeepPolicy, place: Place) -> tuple[int, int]:
    """Most inputs and most attention outputs of a row that wait at one place, each at its own time.

    Args:
        policy: what each layer keeps.
        place: the host or the disk.
    """
    inputs, outputs = zip(*_waiting(policy, place), strict=True)
    return max(inputs), max(outputs)


def most_bytes(policy: KeepPolicy, input_bytes: int, output_bytes: int) -> int:
    """Most bytes of a row that wait on the host at once."""
    return max(inputs * input_bytes + outputs * output_bytes for inputs, outputs in _waiting(policy, "host"))


def _waiting(policy: KeepPolicy, place: Place) -> Iterator[tuple[int, int]]:
    """Inputs and outputs that wait at a place: after the forward, and when each segment has run again."""
    inputs = {index for index, layer in enumerate(policy.layers) if layer.input == place}
    outputs = {index for index, layer in enumerate(policy.layers) if layer.output == place}
    yield len(inputs), len(outputs)
    for segment in reversed(policy.segments):
        *below, last = segment
        if policy.again == place:
            inputs |= set(segment[1:])
            outputs |= {index for index in below if policy.layers[index].output is None}
        if place == policy.attends and policy.layers[last].output is None:
            outputs.add(last)
        yield len(inputs), len(outputs)
        inputs -= set(segment)
        outputs -= set(segment)


def passing(policy: KeepPolicy, place: Place) -> tuple[int, int]:
    """Inputs and attention outputs of a row that go to a place in a step, one after the other."""
    again = [policy.stored_again(segment) for segment in policy.segments] if policy.again == place else []
    inputs, outputs = policy.below[place][-1]
    return inputs + sum(pair[0] for pair in again), outputs + sum(pair[1] for pair in again)
