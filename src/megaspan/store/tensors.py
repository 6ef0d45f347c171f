"""Tensors to and from disk: safetensors files written as a stream, and nested states split into tensors and JSON.

Saving is when finished runs die (case R88): at a million tokens nearly all host memory is pinned for layer inputs, so a save
may not gather a copy of the model or of its optimizer first (16 and 99 GB for 8B parameters with fp32 masters). Here one
staging buffer of 64 MiB is all that a save needs, whatever the model. Every byte is summed (CRC-32) while it is written, by
several threads (`writer.py`): the sum is what tells a damaged file from a good one at resume.

Nothing is pickled: tensors are safetensors, everything else is JSON, so a checkpoint from elsewhere cannot run code.
The format is that of https://github.com/huggingface/safetensors: header length, JSON header, raw little-endian data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from megaspan.layers.shards import Sharded
from megaspan.store.sharded import Feed, in_order
from megaspan.store.writer import FileWriter

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def tensor_bytes(tensors: Mapping[str, Any]) -> int:
    """Bytes that `tensors` (whole or `Sharded`) take on disk, the header (some 100 bytes a tensor) not counted."""
    return sum(_bytes(tensor) for tensor in tensors.values())


def _bytes(tensor: Any) -> int:
    count: int = torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
    return count


def write_tensors(path: Path, tensors: Mapping[str, Any], feed: Feed | None = None) -> int:
    """Writes a safetensors file and returns its CRC-32; host memory above the tensors themselves: 64 MiB.

    Args:
        path: the file to create.
        tensors: by name, on any device; a tensor that is not contiguous is copied, one at a time.
        feed: brings the `Sharded` among them.
    """
    names = in_order(tensors)
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in names:
        tensor = tensors[name]
        end = offset + _bytes(tensor)
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}  # type: ignore[dict-item]
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    with FileWriter(path) as file:
        file.put(torch.frombuffer(bytearray(start), dtype=torch.uint8))
        for name in names:
            tensor = tensors[name]
            if isinstance(tensor, Sharded):
                assert feed is not None
                for piece in feed.take(tensor):
                    file.put(piece, lasting=False)
            else:
                file.put(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return file.crc


class TensorFile(Mapping[str, torch.Tensor]):
    """Tensors of a safetensors file by name, read when asked for, on the CPU.

    They are views of the memory-mapped file (private pages: writing to one does not change the file), so that a state larger
    than host memory can be moved to a device tensor by tensor.
    """

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        self._names = tuple(self._file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._file.get_slice(name).get_shape())


def split_state(state: Any, prefix: str) -> tuple[Any, dict[str, Any]]:
    """Splits a nested state (dicts, lists, tuples, numbers, strings, tensors) into something JSON can hold and its tensors.

    Args:
        state: for instance an optimizer's `state_dict()`; its tensors may be `Sharded`.
        prefix: first part of the tensors' names.

    Raises:
        TypeError: something else is in it, named by its place.
    """
    tensors: dict[str, Any] = {}
    return _split(state, prefix, tensors), tensors


def _split(node: Any, place: str, tensors: dict[str, Any]) -> Any:
    if isinstance(node, np.generic):
        node = node.item()
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, torch.Tensor | Sharded):
        tensors[place] = node
        return {"$tensor": place}
    if isinstance(node, np.ndarray):
        tensors[place] = torch.from_numpy(node.copy())
        return {"$array": place}
    if isinstance(node, list | tuple):
        items = [_split(item, f"{place}.{number}", tensors) for number, item in enumerate(node)]
        return items if isinstance(node, list) else {"$tuple": items}
    if isinstance(node, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in node):
            return {key: _split(value, f"{place}.{key}", tensors) for key, value in node.items()}
        # Optimizer states are keyed by parameter number, which JSON would turn into text.
        return {
            "$pairs": [[_split(key, place, tensors), _split(value, f"{place}.{key}", tensors)] for key, value in node.items()]
        }
    raise TypeError(f"{place} is a {type(node).__name__}, which a checkpoint cannot hold")


def join_state(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that `split_state` split."""
    if isinstance(node, list):
        return [join_state(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if "$tensor" in node:
        return tensors[node["$tensor"]]
    if "$array" in node:
        return tensors[node["$array"]].numpy()
    if "$tuple" in node:
        return tuple(join_state(item, tensors) for item in node["$tuple"])
    if "$pairs" in node:
        return {join_state(key, tensors): join_state(value, tensors) for key, value in node["$pairs"]}
    return {key: join_state(value, tensors) for key, value in node.items()}
