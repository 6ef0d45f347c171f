"""Facts that a plan is made from: the model as its configuration describes it, and the machine.

Both are read without torch, so `megaspan plan` answers in a fraction of a second, before anything of 16 GB is loaded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megaspan.config.parallel import divisors
from megaspan.human import UserError, nearest
from megaspan.plan import families
from megaspan.plan.entries import check_entries, check_rotary
from megaspan.plan.families import FAMILIES, Experts, Family, Widths
from megaspan.plan.rope_native import text_config

_NO_CONNECTION = ("ConnectError", "ConnectTimeout")
_SLOW_TO_FAIL = 3.0  # seconds after which a failed connection is not tried a second time
_SHAPES = Path(__file__).parent / "shapes"


@dataclass(frozen=True)
class Machine:
    """What a process can use.

    Attributes:
        device_name: the GPU's name, or CPU.
        device_bytes: its memory; 0 without a GPU.
        host_bytes: host memory, by cgroup where there is one.
        cores: processor cores.
        host_source: where `host_bytes` came from, in words; empty where nobody asked the machine.
        host_ranks: ranks that share the host's memory; `host_bytes` and `cores` are one's part.
    """

    device_name: str
    device_bytes: int
    host_bytes: int
    cores: int
    host_source: str = ""
    host_ranks: int = 1


@dataclass(frozen=True)
class Counts:
    """What was counted on a model of this class that somebody has built, with weights or without.

    Attributes:
        parameters: all of them, adapters left out; a tied matrix once.
        layers: of each layer.
        linear: of each layer those that multiply every token; of experts the ones that a token visits.
        gated: the MLP has a gate and an up projection.
        streamed: the layers were proven to run in tiles.
        experts: the mixture of experts, where there is one and its widths can be told.
    """

    parameters: int
    layers: tuple[int, ...]
    linear: tuple[int, ...]
    gated: bool
    streamed: bool
    experts: Experts | None = None


@dataclass(frozen=True)
class ModelFacts:
    """The numbers of a causal language model that bytes and seconds follow from.

    Attributes:
        name: where the configuration came from.
        model_type: transformers' name of the family.
        exact: every parameter is counted exactly; False for families that are counted like Llama (see `counted`).
        layers, hidden, heads, kv_heads, head_dim, mlp_width, vocab: sizes.
        tied: embedding and output head are one matrix.
        layer_types: `full_attention` or `sliding_attention` for each layer.
        window: tokens that a sliding layer sees, or None.
        max_positions: `max_position_embeddings`; 0 when there is none.
        rope_parameters: the model's rotary settings as its configuration writes them.
        family: what a layer is made of.
        qk_norm: queries and keys are normed.
        experts: the mixture of experts, or None.
        layer_parameters: parameters of each layer.
        attention_linear: weights of one attention block that multiply every token.
        parameters: all of them.
        linear: of each layer the weights that multiply every token, where they were counted on a model; else None.
    """

    name: str
    model_type: str
    exact: bool
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab: int
    tied: bool
    layer_types: tuple[str, ...]
    window: int | None
    max_positions: int
    rope_parameters: dict[str, Any] | None
    family: Family
    qk_norm: bool
    experts: Experts | None
    layer_parameters: tuple[int, ...]
    attention_linear: int
    parameters: int
    linear: tuple[int, ...] | None = None

    @property
    def known(self) -> bool:
        """Whether the planner knows what a layer of this family keeps; others are taken to keep what Llama's do."""
        return self.model_type in FAMILIES

    def counted(self, counts: Counts) -> ModelFacts:
        """These facts with what was counted on the model itself. Of a family that is known here that changes nothing, unless
        somebody has changed the model."""
        if len(counts.layers) != self.layers:
            return self
        if self.exact and (counts.parameters, counts.layers) == (self.parameters, self.layer_parameters):
            return self
        facts = replace(self, exact=True, parameters=counts.parameters, layer_parameters=counts.layers, linear=counts.linear)
        if self.known:
            return facts
        family = replace(self.family, gated=counts.gated, streamed=counts.streamed)
        return replace(facts, family=family, experts=counts.experts)

    @property
    def query_width(self) -> int:
        """Channels of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all KV heads together."""
        return self.kv_heads * self.head_dim

    @property
    def head_parameters(self) -> int:
        """The output head's matrix, tied or not: it multiplies every token."""
        return self.vocab * self.hidden

    @property
    def active_mlp_width(self) -> int:
        """MLP channels that one token passes: of its experts and the shared one where there are experts."""
        return self.mlp_width if self.experts is None else self.experts.active * self.experts.width + self.experts.shared

    def linear_parameters(self, layer: int) -> int:
        """Weights of a layer that multiply each token once; of experts only those that a token visits."""
        if self.linear is not None:
            return self.linear[layer]
        sparse = self.experts is not None and self.experts.sparse_layers[layer]
        width = self.active_mlp_width if sparse else self.mlp_width
        return self.attention_linear + (3 if self.family.gated else 2) * self.hidden * width

    def span(self, layer: int) -> int | None:
        """Tokens that a query of this layer sees at most; None for all."""
        return self.window if self.layer_types[layer] == "sliding_attention" else None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str | None = None) -> ModelFacts:
        """Facts from the contents of a `config.json`, or `config.to_dict()`.

        Raises:
            UserError: a size is missing, or a value is one that no model can have.
        """
        text = text_config(config)
        model_type = str(text.get("model_type", ""))
        check_entries(text, families.switches(model_type), families.numbers(model_type))
        family = families.family_of(text, model_type)
        layers = families.need(text, "num_hidden_layers", "n_layer")
        hidden = families.need(text, "hidden_size", "n_embd")
        heads = families.need(text, "num_attention_heads", "n_head")
        experts = families.experts_of(text, model_type, layers)
        widths = Widths(
            hidden=hidden,
            heads=heads,
            kv_heads=heads if families.is_latent(text) else int(text.get("num_key_value_heads") or heads),
            head_dim=families.head_dim_of(text, hidden, heads),
            mlp=int(text.get("intermediate_size") or 4 * hidden),
        )
        vocab = families.need(text, "vocab_size")
        tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
        tied = family.tied if tied is None else bool(tied)
        shared = families.attention_parameters(text, model_type, widths) + families.norm_parameters(model_type, hidden)
        dense = families.mlp_parameters(text, model_type, widths)
        moe = families.moe_parameters(model_type, hidden, experts) if experts else 0
        sparse = experts.sparse_layers if experts else (False,) * layers
        per_layer = tuple(shared + (moe if is_sparse else dense) for is_sparse in sparse)
        types = families.layer_types_of(text, model_type, layers)
        _check_sizes(text, widths, layers, types)
        sliding = text.get("sliding_window") if text.get("use_sliding_window") is not False else None
        rope = text.get("rope_parameters") or text.get("rope_scaling")
        qk_norm = bool(family.qk_norm) and (family.qk_norm_key is None or families.has(text, model_type, family.qk_norm_key))
        return cls(
            name=name or str(config.get("_name_or_path") or model_type),
            model_type=model_type,
            exact=model_type in FAMILIES and text is config,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=widths.kv_heads,
            head_dim=widths.head_dim,
            mlp_width=widths.mlp,
            vocab=vocab,
            tied=tied,
            layer_types=types,
            window=int(sliding) if sliding and "sliding_attention" in types else None,
            max_positions=int(text.get("max_position_embeddings") or 0),
            rope_parameters=dict(rope) if isinstance(rope, Mapping) else None,
            family=family,
            qk_norm=qk_norm,
            experts=experts,
            layer_parameters=per_layer,
            attention_linear=hidden * (widths.heads * 2 + widths.kv_heads * 2) * widths.head_dim,
            parameters=vocab * hidden * (1 if tied else 2) + sum(per_layer) + family.norm_vectors * hidden,
        )


def _check_sizes(text: Mapping[str, Any], widths: Widths, layers: int, types: tuple[str, ...]) -> None:
    """Refuses sizes that no model can have together: weights would be made, or read, before anybody said so."""
    of, model_type = "of the model's configuration", str(text.get("model_type", ""))
    correct = "Correct it in the model's config.json"
    if len(types) < layers:
        raise UserError(
            f"layer_types {of} names too few layers", got=len(types), allowed=f"one for each of {layers}", do=correct
        )
    if widths.heads % widths.kv_heads:
        raise UserError(
            f"num_key_value_heads {of} does not divide its num_attention_heads, {widths.heads}",
            got=widths.kv_heads,
            allowed=", ".join(map(str, divisors(widths.heads))),
            do=correct,
        )
    if not text.get("head_dim") and not families.is_latent(text) and widths.hidden % widths.heads:
        raise UserError(
            f"hidden_size {of} is no multiple of its num_attention_heads, {widths.heads}",
            got=widths.hidden,
            allowed=f"a multiple of {widths.heads}, or a head_dim beside it",
            do=correct,
        )
    rotates = model_type in FAMILIES or any(text.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling"))
    if rotates:
        check_rotary(text, int(text["qk_rope_head_dim"]) if families.is_latent(text) else widths.head_dim)


def shape_names() -> tuple[str, ...]:
    """Shapes that ship with the package: sizes of a public model, random weights."""
    return tuple(sorted(path.stem for path in _SHAPES.glob("*.json")))


def model_facts(name_or_path: str, revision: str | None = None) -> ModelFacts:
    """Facts of a model folder, a shape name or a hub name. See `read_config`."""
    return ModelFacts.from_config(read_config(name_or_path, revision), name_or_path)


def read_config(name_or_path: str, revision: str | None = None) -> dict[str, Any]:
    """The contents of a model's `config.json`: a folder or file, a shape that ships here, the hub's cache, then the hub.

    Raises:
        UserError: there is none.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        path = path / "config.json"
    elif name_or_path in shape_names():
        path = _SHAPES / f"{name_or_path}.json"
    elif not path.is_file():
        path = _from_hub(name_or_path, revision)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path.parent} is no model folder: it has no config.json",
            do="Name the folder that holds config.json and *.safetensors",
            option="model_name_or_path",
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is no model's configuration, which is JSON: {error}",
            do="Name a model folder, or copy its config.json again",
            option="model_name_or_path",
        ) from error
    if not isinstance(config, dict):
        what, do = f"{path} holds no configuration of a model", "Name a model folder, or copy its config.json again"
        raise UserError(what, do=do, option="model_name_or_path")
    return config


def _from_hub(name: str, revision: str | None) -> Path:
    path = Path(name).expanduser()
    beside = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    folder = nearest(path.name, beside, likeness=0.7)
    close = path.parent / folder if folder else nearest(name, shape_names())
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".json")
    if looks_like_path or "/" not in name:
        raise UserError(
            f"model_name_or_path is no folder{'' if path.is_absolute() else f' in {Path.cwd()}'}, no hub name and no shape",
            got=name,
            allowed=f"a folder with a config.json, owner/name, or {', '.join(shape_names())}",
            do=f"Did you mean {close}?" if close else "Check its spelling",
            option="model_name_or_path",
        )
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache  # a quarter of a second, so only here
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError as error:
        raise UserError(
            "model_name_or_path is no folder, and no name that the hub could have",
            got=name,
            allowed=f"a folder with a config.json, owner/name, or {', '.join(shape_names())}",
            do="Check its spelling",
            option="model_name_or_path",
        ) from error
    if isinstance(cached, str):
        return Path(cached)
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"the configuration of {name} is not in the hub's cache, and HF_HUB_OFFLINE=1 forbids to fetch it",
            do=f"Did you mean the folder {path.parent / folder}?"
            if folder
            else f"Give a model folder, or fill the cache where there is a network: hf download {name}",
            option="model_name_or_path",
        )
    if (reason := no_way_to_the_hub(name, revision)) is not None:
        raise UserError(
            f"the configuration of {name} is not in the hub's cache, and the hub cannot be reached: {reason}",
            do=f"Did you mean the folder {path.parent / folder}?"
            if folder
            else f"Give a model folder, or fill the cache where there is a network: hf download {name}",
            option="model_name_or_path",
        )
    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except Exception as error:  # the hub client raises a dozen kinds, all of which mean the same here
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason = reason.rstrip(".") + proxy_to_the_hub()
        raise UserError(
            f"the configuration of {name} is neither in the hub's cache nor can it be fetched: {reason}",
            do=f"Did you mean the folder {path.parent / folder}?"
            if folder
            else "Check the name, model_revision and HF_TOKEN, or give a folder",
            option="model_name_or_path",
        ) from error


def no_way_to_the_hub(name: str, revision: str | None = None, *, kind: Literal["model", "dataset"] = "model") -> str | None:
    """Why no connection to the hub can be made, or None where one can, and where `HF_HUB_OFFLINE` forbids to ask.

    The hub's client asks for each file six times, for 24 s, before it says that a machine has no network: a name that is not
    resolved, a port that is closed, nobody who answers in 10 s. Here that is asked once or twice, for one file. Whatever else
    goes wrong, a server that is slow too, is left to the client's patience.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    begun, reason = time.monotonic(), ""
    for pause in (0.0, 1.0):
        if time.monotonic() - begun > _SLOW_TO_FAIL:
            break
        time.sleep(pause)
        try:
            file = "config.json" if kind == "model" else "README.md"
            get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind, revision=revision))
        except Exception as error:  # of httpx, whichever the client has; others are a proxy's or a server's: somebody is there
            if type(error).__name__ not in _NO_CONNECTION:
                return None
            reason = str(error).strip() or type(error).__name__
        else:
            return None
    return reason.rstrip(".") + proxy_to_the_hub()


def proxy_to_the_hub() -> str:
    """The proxy that stands between, to follow the reason of a failed connection; empty where there is none."""
    from urllib.parse import urlsplit
    from urllib.request import getproxies, proxy_bypass

    from huggingface_hub.constants import ENDPOINT

    hub, proxies = urlsplit(ENDPOINT), getproxies()
    scheme = hub.scheme if hub.scheme in proxies else "all"
    if scheme not in proxies or proxy_bypass(hub.hostname or ""):
        return ""
    proxy = urlsplit(proxies[scheme] if "//" in proxies[scheme] else f"//{proxies[scheme]}")
    place = proxy.netloc.rpartition("@")[2]  # without name and password
    return f", through the proxy {place} that {scheme.upper()}_PROXY names"
