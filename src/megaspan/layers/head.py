"""What a model does between its last hidden state and its logits, read from the live model.

The chunked loss never calls the model's output layer: at 1,048,576 tokens and 151,936 words the logits would be 593 GiB in
fp32. It multiplies tiles by the layer's weight itself, so it has to know everything else that happens there: bias, multiplier,
soft cap, adapters. Model families disagree (Granite divides its logits, HyperCLOVA X multiplies by the number of the same name,
Gemma caps), and a step left out gives a wrong loss without a word. So `head_of` reads the model, and `check_head` compares what
it read with the model's own forward on a few tokens; a model that does anything else to its logits is refused.

Names of the configuration entries: transformers. Soft cap: Gemma 2 (arXiv:2408.00118). LoRA: arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaspan.human import UserError
from megaspan.layers.dropout import counter_mask
from megaspan.layers.tile import HOOKS

_MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DIVIDERS = ("logits_scaling",)
_MULTIPLIED_BY_DIVIDERS = ("hyperclovax",)  # model types that multiply by what Granite divides by
_HARMLESS_HOOKS = ("megaspan.", "transformers.utils.output_capturing")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True, eq=False)
class LowRank:
    """A trained addition to a linear layer: `scaling * dropout(x) @ a.T @ b.T`.

    Attributes:
        a_RE: first factor, rank x hidden.
        b_VR: second factor, vocabulary x rank.
        scaling: multiplier of the product.
        dropout: probability with which an entry of the adapter's input is zeroed; 0 in evaluation.
    """

    a_RE: Tensor
    b_VR: Tensor
    scaling: float
    dropout: float = 0.0


@dataclass(frozen=True, eq=False)
class Head:
    """The output layer of a causal language model: `cap(scale * (x @ weight.T + bias + deltas))`, `cap(y) = c * tanh(y / c)`.

    Attributes:
        weight_VE: vocabulary x hidden; the embedding itself where the two are tied.
        bias_V: added to the product, or None.
        deltas: adapters on the layer.
        scale: multiplier of the logits.
        softcap: bound of the logits, applied after the multiplier, or None.
    """

    weight_VE: Tensor
    bias_V: Tensor | None = None
    deltas: tuple[LowRank, ...] = ()
    scale: float = 1.0
    softcap: float | None = None

    @property
    def vocab(self) -> int:
        """Number of logits per token."""
        return self.weight_VE.shape[0]

    def linear(self, hidden_tE: Tensor, numbers_t: Tensor | None = None, step_seed: int | None = None) -> Tensor:
        """The layer's own output, [t, V], by ordinary operations in the order of `nn.Linear` and PEFT.

        Args:
            hidden_tE: last hidden states.
            numbers_t: numbers of the tokens, int64 [t], for dropout.
            step_seed: the number that dropout is drawn from; without the two there is none.
        """
        result_tV = nn.functional.linear(hidden_tE, self.weight_VE, self.bias_V)
        dtype = result_tV.dtype
        for number, delta in enumerate(self.deltas):
            input_tE = hidden_tE.to(delta.a_RE.dtype)
            if delta.dropout and numbers_t is not None and step_seed is not None:
                input_tE = input_tE * head_mask(step_seed, number, numbers_t, input_tE, delta.dropout)
            low_tR = nn.functional.linear(input_tE, delta.a_RE)
            result_tV = result_tV + nn.functional.linear(low_tR, delta.b_VR) * delta.scaling
        return result_tV.to(dtype)

    def finish(self, logits_tV: Tensor) -> Tensor:
        """Multiplier and soft cap, [t, V], by ordinary operations."""
        if self.scale != 1.0:
            logits_tV = logits_tV * self.scale
        if self.softcap is not None:
            logits_tV = torch.tanh(logits_tV / self.softcap) * self.softcap
        return logits_tV

    def describe(self) -> str:
        """The formula with its numbers, for the run header."""
        text = "x·W"
        if self.bias_V is not None:
            text += " + b"
        if self.deltas:
            text += " + LoRA rank " + "+".join(str(delta.a_RE.shape[0]) for delta in self.deltas)
        if self.scale != 1.0:
            text = f"{self.scale:.6g}·({text})"
        if self.softcap is not None:
            text = f"{self.softcap:g}·tanh(({text})/{self.softcap:g})"
        return text


def head_mask(step_seed: int, adapter: int, first_token: int | Tensor, input_nE: Tensor, p: float) -> Tensor:
    """What dropout multiplies the input of an adapter on the head by, [n, E]: 0 or 1 / (1 - p).

    Args:
        step_seed: the number it is drawn from.
        adapter: which of the head's.
        first_token: number of the first token, or of each, int64 [n].
        input_nE: the input, in fp32 at least.
        p: probability that an entry is dropped.
    """
    rows, channels = input_nE.shape
    kept_nE = counter_mask(step_seed, -1, f"head {adapter}", first_token, rows, channels, p, input_nE.device)
    return kept_nE.to(input_nE.dtype) / (1 - p)


def head_of(model: nn.Module) -> Head:
    """The head of a transformers causal language model, or of a PEFT model around one, as it stands now.

    It costs microseconds and runs nothing, so it is called at every forward: parameters replaced, adapters switched and a model
    put into evaluation are seen. Whether the model's forward does more than this is for `check_head`, once.

    Raises:
        UserError: the model has no linear output layer, an adapter on it whose formula is not known here, or a hook in it.
    """
    plain = _without_peft(model)
    layer = plain.get_output_embeddings() if hasattr(plain, "get_output_embeddings") else None
    if layer is None:
        raise UserError(
            "the model has no output layer to take a loss from", found=type(plain).__name__, allowed="a causal language model"
        )
    weight_VE, bias_V, deltas = _linear_of(layer)
    _check_unhooked(plain, layer)
    scale, softcap = _logit_settings(plain)
    return Head(weight_VE, bias_V, deltas, scale, softcap)


@torch.no_grad()
def check_head(model: nn.Module) -> Head:
    """Compares `head_of(model)` with the model's own forward on a few tokens, and returns it.

    In evaluation: the output layer is given the decoder's last hidden state, unchanged; its output is `Head.linear` of it; and
    when it is made to answer a known ladder of values, 1/64 to 1,024 with both signs, one to each word, what leaves the model
    is `Head.finish` of that ladder. The ladder sees caps that small random logits would not, and words that are masked; it is
    fp32 in a bf16 model too, so that a multiplier wrong by 1e-5 is seen. The decoder alone, given the tokens, must have the
    same hidden state. In training: the loss of the model's own forward must be that of its logits.

    Three forwards. Run it before checkpointing is installed; all ranks of a sharded model together. Training mode, generators
    and weights are left as they are.

    Raises:
        UserError: the model treats its logits in another way.
    """
    head, plain = head_of(model), _without_peft(model)
    ladder_V = _ladder(head)
    with _answering(plain, lambda output: ladder_V.expand(output.shape)) as seen:
        plain.eval()
        tokens = torch.arange(4, device=head.weight_VE.device)[None] % head.vocab
        logits = plain(input_ids=tokens, use_cache=False).logits
        given_tE = seen["hidden"][0] if "hidden" in seen else None
        alone_tE = plain.get_decoder()(input_ids=tokens, use_cache=False, return_dict=True).last_hidden_state[0]

    if given_tE is None or "input" not in seen or not torch.equal(seen["input"][0], given_tE):
        raise _unknown(plain, "its output layer is not given the last hidden state as it is")
    own, ours = seen["output"].double(), head.linear(seen["input"]).double()
    if own.shape != ours.shape or (own - ours).norm() > 4 * torch.finfo(seen["output"].dtype).eps * own.norm():
        raise _unknown(plain, "its output layer is more than a linear layer with LoRA")
    expected = head.finish(ladder_V).expand(own.shape)
    if logits.shape != own.shape or not torch.allclose(logits.float(), expected, rtol=1e-5, atol=1e-6):
        raise _unknown(plain, f"its logits are not {head.describe()}")
    # A mixture of experts may add in another order and so send one of the tokens elsewhere.
    distance_t = (alone_tE - given_tE).float().norm(dim=1) / given_tE.float().norm(dim=1).clamp(min=1e-30)
    if not distance_t.median() <= max(1e-4, 8 * torch.finfo(given_tE.dtype).eps):
        raise _unknown(plain, "its own forward gives its decoder more than the tokens")
    _check_loss(plain, head, ladder_V)
    return head


def _check_loss(model: Any, head: Head, ladder_V: Tensor) -> None:
    """Compare the loss of the model's own forward, in training, with the cross entropy of the logits of that very forward.

    So a penalty on logits or hidden states, smoothed labels and dropout before the output layer are seen, and dropout inside
    the decoder or the layer's adapters is not in the way. The logits are the live ones in fp32, plus a small part of the
    ladder: a new output layer of zeros would hide smoothing.
    """
    device = ladder_V.device
    tokens = torch.arange(1, 9, device=device)[None] * 7919 % head.vocab
    labels = tokens.flip(1).clone()
    labels[0, 3] = -100
    with _answering(model, lambda output: output.float() + ladder_V / 256) as seen:
        model.train()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            # Without the balance loss, which transformers 5.17 cannot make of sharded layers.
            plain = {"output_router_logits": False} if getattr(model.config, "output_router_logits", False) else {}
            loss = model(input_ids=tokens, labels=labels, use_cache=False, **plain).loss

    if not ("input" in seen and "hidden" in seen and torch.equal(seen["input"], seen["hidden"])):
        raise _unknown(model, "in training its output layer is not given the last hidden state as it is")
    expected = nn.functional.cross_entropy(head.finish(seen["answer"])[0, :-1], labels[0, 1:])
    if loss is None or not torch.allclose(loss.float(), expected.float(), rtol=1e-5, atol=1e-6):
        raise _unknown(model, "the loss that its own forward gives in training is not the cross entropy of its logits")


@contextmanager
def _answering(model: Any, answer: Callable[[Tensor], Tensor]) -> Iterator[dict[str, Tensor]]:
    """Inside, the output layer gives `answer` of its output instead; every module's mode is put back after it.

    Yields:
        The last call's tensors: `hidden` of the decoder, `input`, `output` and `answer` of the output layer.
    """
    seen: dict[str, Tensor] = {}

    def exchange(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        seen["input"], seen["output"], seen["answer"] = args[0], output, answer(output)
        return seen["answer"].clone()  # a model may write into its logits

    def watch(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        seen["hidden"] = output[0] if isinstance(output, tuple) else output.last_hidden_state

    modes = [(module, module.training) for module in model.modules()]
    hooks = [
        model.get_output_embeddings().register_forward_hook(exchange),
        model.get_decoder().register_forward_hook(watch),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode


def _check_unhooked(model: nn.Module, layer: nn.Module) -> None:
    """Refuse somebody's hook in the output layer, which the loss never calls; a pruned weight is made by one."""
    for module in layer.modules():
        hooks = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
        # The package's own gather a sharded table; transformers' collect outputs, which a call with labels does not ask for.
        if all((getattr(hook, "__module__", None) or "").startswith(_HARMLESS_HOOKS) for hook in hooks):
            continue
        name = next(name for name, each in model.named_modules() if each is module)
        raise UserError(
            f"a hook on {name} is to see whole rows, and the loss reads the weight of the output layer without calling it",
            do="Take the hook off (torch.nn.utils.prune.remove does so for a pruned weight)",
        )


def _linear_of(layer: Any) -> tuple[Tensor, Tensor | None, tuple[LowRank, ...]]:
    """Weight, bias and adapters of a linear layer, PEFT's LoRA layer or PEFT's trained copy of a layer."""
    if type(layer).forward is nn.Linear.forward and "forward" not in vars(layer):
        return layer.weight, layer.bias, ()
    if type(layer).__module__.startswith("peft."):
        from peft.tuners.lora.layer import Linear as LoraLinear
        from peft.utils.other import ModulesToSaveWrapper

        if isinstance(layer, ModulesToSaveWrapper):
            copies, active = layer.modules_to_save, layer.active_adapters
            trained = bool(active) and active[0] in copies and not layer.disable_adapters
            return _linear_of(copies[active[0]] if trained else layer.original_module)
        if isinstance(layer, LoraLinear):
            weight_VE, bias_V, below = _linear_of(layer.base_layer)
            return weight_VE, bias_V, below + _lora_of(layer)
    raise UserError(
        "the loss cannot read this kind of output layer",
        found=f"{type(layer).__module__}.{type(layer).__qualname__}",
        allowed="nn.Linear, PEFT's LoRA on it, or a copy of it in lora_modules_to_save",
    )


def _lora_of(layer: Any) -> tuple[LowRank, ...]:
    if layer.merged and layer.disable_adapters:
        raise UserError("adapters on the output layer are merged and switched off at once", do="call unmerge_adapter() first")
    if layer.merged or layer.disable_adapters:
        return ()
    deltas = []
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        variant = type(layer.lora_variant[name]).__name__ if name in layer.lora_variant else None
        if variant or a.bias is not None or b.bias is not None:
            raise UserError(
                "an adapter on the output layer must be plain LoRA",
                found=f"adapter {name!r} with {variant or 'a bias'}",
                do="leave lm_head out of lora_target_modules, or train a copy of it with lora_modules_to_save",
            )
        probability = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
        deltas.append(LowRank(a.weight, b.weight, float(layer.scaling[name]), probability))
    return tuple(deltas)


def _logit_settings(model: Any) -> tuple[float, float | None]:
    """Multiplier and soft cap: at most one of each kind is set in the families known."""
    config = model.config.get_text_config()
    scale, softcap = 1.0, None
    for name in _MULTIPLIERS:
        scale *= _number(model, name, 1.0)
    for name in _DIVIDERS:
        value = _number(model, name, 1.0)
        scale = scale * value if config.model_type in _MULTIPLIED_BY_DIVIDERS else scale / value
    for name in _SOFTCAPS:
        if getattr(config, name, None) is not None:
            softcap = _number(model, name, 0.0)
    return scale, softcap


def _number(model: Any, name: str, default: float) -> float:
    """By the text configuration, or by the model itself where its class keeps a copy (Cohere): that is what it reads."""
    value = vars(model).get(name, getattr(model.config.get_text_config(), name, None))
    if value is None:
        return default
    if not isinstance(value, int | float) or value == 0:
        raise UserError(f"the model's configuration sets {name} to something that is not a factor", got=value)
    return float(value)


def _without_peft(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _ladder(head: Head) -> Tensor:
    """A value for each word, [V]: powers of two from 1/64 to 1,024 with both signs, in turn."""
    steps = torch.arange(head.vocab, device=head.weight_VE.device)
    return torch.exp2((steps % 17 - 6).float()) * (1 - 2 * (steps // 17 % 2))


def _unknown(model: nn.Module, why: str) -> UserError:
    return UserError(
        f"the loss of {type(model).__name__} is not known here, because {why}",
        allowed="a linear output layer on the last hidden state, with a multiplier, a soft cap and LoRA at most",
    )
