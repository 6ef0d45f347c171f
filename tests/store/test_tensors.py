import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megaspan.store import writer as module
from megaspan.store.sums import file_sums
from megaspan.store.tensors import TensorFile, join_state, split_state, write_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float16, torch.uint32]


def example(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(dtype) if dtype == torch.bool else (torch.rand(shape) * 100).to(dtype)


@settings(deadline=None, max_examples=40)
@given(
    shapes=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=6),
    chunk=st.sampled_from([8, 24, 1 << 20]),
)
def test_the_library_reads_what_we_write(tmp_path_factory, shapes, chunk):
    folder = tmp_path_factory.mktemp("tensors")
    wanted = {f"t{number}": example(dtype, tuple(shape)) for number, (dtype, shape) in enumerate(shapes)}
    before, module.CHUNK_BYTES = module.CHUNK_BYTES, chunk
    try:
        crc = write_tensors(folder / "a.safetensors", wanted)
    finally:
        module.CHUNK_BYTES = before
    assert [crc] == file_sums([folder / "a.safetensors"], 1)
    for read in (load_file(folder / "a.safetensors"), dict(TensorFile(folder / "a.safetensors"))):
        assert read.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert read[name].dtype == tensor.dtype
            assert read[name].shape == tensor.shape
            assert torch.equal(read[name], tensor)


def test_a_tensor_that_is_not_contiguous_is_written_in_order(tmp_path):
    tensor = torch.arange(12.0).view(3, 4).T
    write_tensors(tmp_path / "a.safetensors", {"x": tensor})
    assert torch.equal(TensorFile(tmp_path / "a.safetensors")["x"], tensor)


def test_the_file_gives_shapes_without_reading_and_refuses_unknown_names(tmp_path):
    write_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(3, 5)})
    file = TensorFile(tmp_path / "a.safetensors")
    assert file.shape("x") == (3, 5)
    assert "y" not in file


def test_a_state_comes_back_with_its_types():
    state = {
        "state": {0: {"step": torch.tensor(3.0), "moment": torch.ones(2)}, 1: {}},
        "groups": [{"betas": (0.9, 0.999), "lr": 1e-3, "fused": None, "params": [0, 1], "name": "a"}],
        "odd": {"$x": float("inf"), 1.5: (), "t": [torch.zeros(1)]},
    }
    skeleton, tensors = split_state(state, "optimizer")
    import json

    back = join_state(json.loads(json.dumps(skeleton)), tensors)
    assert back["groups"] == state["groups"]
    assert isinstance(back["groups"][0]["betas"], tuple)
    assert list(back["state"]) == [0, 1]
    assert torch.equal(back["state"][0]["moment"], torch.ones(2))
    assert back["odd"]["$x"] == float("inf")
    assert back["odd"][1.5] == ()


def test_what_a_checkpoint_cannot_hold_is_named_by_its_place():
    import pytest

    with pytest.raises(TypeError, match=r"state\.a\.0 is a object"):
        split_state({"a": [object()]}, "state")
