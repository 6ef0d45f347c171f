"""`load_model`: folders and shapes, their types and positions, and what is refused before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megaspan.human import UserError
from megaspan.model import adopt_model, load_model, load_tokenizer, prepare
from megaspan.model.load import check_vocabulary, live_dtype
from megaspan.model.source import find_source
from tests.model.support import plan, settings, step
from tests.models import batch, save_model_folder, tiny, tiny_tokenizer

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3")


def loaded(folder: Path | str, **changes: Any) -> Any:
    return load_model(settings(model_name_or_path=str(folder), **changes), "cpu")


def edit(folder: Path, **changes: Any) -> Path:
    """Change a folder's config.json; None takes a key away."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def shape(tmp_path: Path, family: str = "qwen3", **changes: Any) -> Path:
    tiny(family).config.save_pretrained(tmp_path)
    return edit(tmp_path, **changes)


def test_a_folder(folder: Path) -> None:
    got = loaded(folder)
    want = AutoModelForCausalLM.from_pretrained(folder)
    assert got.model.training
    assert all(p.equal(q) and p.dtype == torch.float32 for p, q in zip(got.model.parameters(), want.parameters(), strict=True))
    assert got.tokenizer("ab")["input_ids"] == tiny_tokenizer()("ab")["input_ids"]
    assert got.facts.layers == 2
    assert got.facts.parameters == sum(p.numel() for p in want.parameters())
    assert not got.random_weights
    assert got.rope_readback.exact
    assert got.rope_readback.theta == pytest.approx(1e6)
    assert step(prepare(got.model, settings(), plan()), **batch(37))[0] > 0


def test_the_commit_changes_with_the_folder(tmp_path: Path, folder: Path) -> None:
    one, other = loaded(folder), loaded(save_model_folder(tmp_path, "qwen3", layers=1))
    assert one.commit == loaded(folder).commit != other.commit
    assert one.commit in one.origin


@pytest.mark.parametrize(
    ("changes", "device", "dtype"),
    [
        ({}, "cpu", torch.float32),
        ({}, "cuda", torch.bfloat16),
        ({"bf16": True}, "cpu", torch.bfloat16),
        ({"bf16": False}, "cuda", torch.float32),
        ({"dtype": "bfloat16"}, "cpu", torch.bfloat16),
        ({"dtype": "float32"}, "cuda", torch.bfloat16),  # fp32 masters in the optimizer, bf16 computation
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, "cpu", torch.bfloat16),
    ],
)
def test_the_type_of_the_weights(changes: dict[str, Any], device: str, dtype: torch.dtype) -> None:
    assert live_dtype(settings(**changes), torch.device(device)) == dtype


def test_bf16_weights_leave_the_positions_in_fp32(folder: Path) -> None:
    """R50."""
    got = loaded(folder, dtype="bfloat16")
    assert {p.dtype for p in got.model.parameters()} == {torch.bfloat16}
    assert got.rope_readback.dtype == "float32"


def test_yarn_is_in_the_module_from_the_start(folder: Path) -> None:
    """R46, R51: theta is the model's own, the new length is in the configuration, and both are read from the live module."""
    got = loaded(folder, max_length=16384, model_init_kwargs={"rope_parameters": YARN})
    assert got.rope_readback.factor == pytest.approx(4.0)
    assert got.rope_readback.attention_factor == pytest.approx(1.1386, abs=1e-4)
    assert got.rope_readback.theta == pytest.approx(1e6)
    assert got.model.config.max_position_embeddings == 16384
    assert got.tokenizer.model_max_length >= 16384
    from transformers import Qwen3ForCausalLM

    config = AutoModelForCausalLM.from_pretrained(folder).config
    config.rope_parameters = YARN | {"rope_theta": 1e6}
    wanted = Qwen3ForCausalLM(config).model.rotary_emb.inv_freq
    assert got.model.model.rotary_emb.inv_freq.equal(wanted)


def test_auto_extends_by_itself(folder: Path) -> None:
    got = loaded(folder, max_length=16384, model_init_kwargs={"rope_parameters": "auto"})
    assert got.rope_readback.factor == pytest.approx(4.0)


def test_never_extended_unasked(folder: Path) -> None:
    """R52."""
    with pytest.raises(UserError, match="allow_past_window"):
        loaded(folder, max_length=16384)
    got = loaded(folder, max_length=16384, allow_past_window=True)
    assert got.rope_readback.factor == pytest.approx(1.0)


def test_only_full_attention_layers_are_extended(tmp_path: Path) -> None:
    """R48."""
    got = loaded(save_model_folder(tmp_path, "gemma3"), max_length=16384, model_init_kwargs={"rope_parameters": YARN})
    kinds = {entry.layer_type: entry.rope_type for entry in got.rope_readback.entries}
    assert kinds == {"sliding_attention": "default", "full_attention": "yarn"}


def test_two_loads_share_nothing(folder: Path) -> None:
    one, other = loaded(folder), loaded(folder)
    prepare(one.model, settings(), plan())
    assert other.model.config._attn_implementation != "megaspan"
    assert one.model.config is not other.model.config


def test_overrides(folder: Path) -> None:
    got = loaded(folder, model_init_kwargs={"rms_norm_eps": 0.5, "num_hidden_layers": 1})
    assert len(got.model.model.layers) == len(got.model.config.layer_types) == 1
    assert "11 weights of the checkpoint are not used" in got.origin
    assert got.model.model.norm.variance_epsilon == 0.5
    with pytest.raises(UserError, match=r"rms_norm_epsilon .* Did you mean rms_norm_eps"):
        loaded(folder, model_init_kwargs={"rms_norm_epsilon": 0.5})
    with pytest.raises(UserError, match="num_hidden_layers cannot have this value"):
        loaded(folder, model_init_kwargs={"num_hidden_layers": "many"})
    with pytest.raises(UserError, match=r"num_hidden_layers do not go together .*layer_types"):
        loaded(folder, model_init_kwargs={"num_hidden_layers": 3})


def test_a_shape_gets_random_weights(tmp_path: Path) -> None:
    place = shape(tmp_path)
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    one, two, other = loaded(place), loaded(place / "config.json"), loaded(place, seed=7)
    assert torch.random.get_rng_state().equal(before)
    assert one.random_weights
    assert "random weights (seed 42)" in one.origin
    assert one.tokenizer is None
    assert all(p.equal(q) for p, q in zip(one.model.parameters(), two.model.parameters(), strict=True))
    assert not one.model.lm_head.weight.equal(other.model.lm_head.weight)
    assert 0.015 < float(one.model.lm_head.weight.detach().std()) < 0.025
    assert step(prepare(one.model, settings(), plan()), **batch(37))[0] > 0


def test_shipped_shapes() -> None:
    got = loaded("qwen3-0.6b", model_init_kwargs={"num_hidden_layers": 1, "vocab_size": 64}, dtype="bfloat16")
    assert got.model.config.hidden_size == 1024
    assert got.model.model.layers[0].self_attn.head_dim == 128
    assert got.rope_readback.theta == pytest.approx(1e6)


def test_a_shape_with_a_tokenizer(tmp_path: Path) -> None:
    tiny_tokenizer(shape(tmp_path, vocab_size=320))
    assert loaded(tmp_path).tokenizer is not None


def test_a_padded_vocabulary_is_fine_and_a_small_one_is_not(folder: Path) -> None:
    """R91."""
    check_vocabulary(tiny_tokenizer(), 259)
    check_vocabulary(None, 128)
    with pytest.raises(UserError, match="token 258, but the model has embeddings for 258"):
        check_vocabulary(tiny_tokenizer(), 258)
    tokenizer = load_tokenizer(settings(model_name_or_path=str(folder)))
    with pytest.raises(UserError, match="Use the model's own tokenizer"):
        check_vocabulary(tokenizer, 128)


def test_a_missing_weight_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model_folder(tmp_path, "qwen3")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.q_norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 weights.*q_norm"):
        loaded(tmp_path)


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be loaded"):
        loaded(edit(save_model_folder(tmp_path, "qwen3"), intermediate_size=80))


@pytest.mark.parametrize("kept", [0, -1000])
def test_a_weight_file_that_was_cut_off_is_named_before_anything_is_read(tmp_path: Path, kept: int) -> None:
    """A copy that stopped half-way ended in a traceback of safetensors, after the text was tokenised."""
    file = save_model_folder(tmp_path, "qwen3") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"/model\.safetensors is damaged or cut off: .* Copy or download it again\."):
        find_source(settings(model_name_or_path=str(tmp_path)))


@pytest.mark.parametrize("text", ["{", '{"a": 1}', ""])
def test_a_broken_tokenizer_is_a_sentence(tmp_path: Path, text: str) -> None:
    (save_model_folder(tmp_path, "qwen3") / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"the tokenizer of .* cannot be loaded: .* Copy its tokenizer files again"):
        load_tokenizer(settings(model_name_or_path=str(tmp_path)))


def test_pickles_are_refused(tmp_path: Path) -> None:
    place = save_model_folder(tmp_path, "qwen3")
    (place / "model.safetensors").rename(place / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"\.bin only; allowed: safetensors"):
        loaded(place)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3", {"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ("qwen3", {"architectures": ["Qwen3Model"]}, "Qwen3Model"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("gemma3", {"use_bidirectional_attention": True}, "later tokens"),
        ("qwen3", {"model_type": "no_such_family"}, "cannot be loaded"),
        ("qwen3", {"attention_dropout": 0.1}, "attention_dropout: 0.1"),
        ("qwen3", {"hidden_act": "swishy"}, "cannot be loaded: .*swishy"),
        ("qwen3", {"pad_token_id": 5_000}, "cannot be loaded: .*"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "factor"),
    ],
)
def test_kinds_that_are_refused(tmp_path: Path, family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        loaded(shape(tmp_path, family, **changes))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("t5", "not a causal|encoder-decoder"),
        ("bart", "encoder-decoder"),
        ("gemma3", "more than a language model"),
        ("qwen2_vl", "more than a language model"),
        ("bert", "later tokens"),
        ("vit", "not a causal language model"),
        ("qwen3_next", "linear_attention"),
        ("jamba", "carry a state"),
        ("mamba", "carry a state"),
        ("llama4_text", "chunked_attention"),
        ("bloom", "own code"),
        ("falcon", "own code"),
    ],
)
def test_families_that_are_refused(tmp_path: Path, kind: str, words: str) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=words):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (None, "qwen3-0.6b, qwen3-4b, qwen3-8b"),
        ("./nothing/here", "does not exist"),
        ("/nothing/here", "does not exist"),
        ("qwen3-4B-", "Did you mean qwen3-4b"),
    ],
)
def test_names_of_nothing(name: str | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        find_source(settings(model_name_or_path=name))


def test_folders_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        loaded(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="LoRA adapter"):
        loaded(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match="is a file"):
        loaded(tmp_path / "notes.txt")


def test_a_hub_name_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"nobody/nothing cannot be loaded: .* HF_HUB_OFFLINE=1"):
        loaded("nobody/nothing")


def test_without_a_network_the_cache_alone_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client would ask for every file that is not there, 24 s each."""
    from megaspan.model import load, source

    asked: list[bool] = []

    def nothing(*_: object, local_files_only: bool = False, **__: object) -> None:
        asked.append(local_files_only)
        raise OSError("We couldn't connect")

    monkeypatch.setattr(source, "no_way_to_the_hub", lambda *_: "no such name")
    for loader in (source.AutoConfig, load.AutoTokenizer):
        monkeypatch.setattr(loader, "from_pretrained", nothing)
    config = settings(model_name_or_path="nobody/nothing", model_revision="v1")
    for call, what in ((lambda: loaded("nobody/nothing"), "files"), (lambda: load.load_tokenizer(config), "tokenizer")):
        with pytest.raises(
            UserError, match=rf"^the {what} of nobody/nothing .*hub cannot be reached: no such name\. Name a mod"
        ):
            call()
    assert asked == [True, True]
    assert "hf download nobody/nothing --revision v1" in source.fill_the_cache(find_source(config))


def test_a_model_given_as_an_object() -> None:
    got = adopt_model(tiny("qwen3").eval(), settings(max_length=4096), "cpu")
    assert got.model.training
    assert got.rope_readback.exact
    with pytest.raises(UserError, match="allow_past_window"):
        adopt_model(tiny("qwen3"), settings(max_length=4097), "cpu")
    with pytest.raises(UserError, match="rms_norm_eps, rope_parameters"):
        adopt_model(tiny("qwen3"), settings(model_init_kwargs={"rms_norm_eps": 1.0, "rope_parameters": "auto"}), "cpu")
    with pytest.raises(UserError, match="no weights yet"), torch.device("meta"):
        adopt_model(tiny_on_meta(), settings(), "cpu")


def tiny_on_meta() -> Any:
    from tests.models import tiny_config

    return AutoModelForCausalLM.from_config(tiny_config("qwen3"))
