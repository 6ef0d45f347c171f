"""A family that the planner does not know, tried at toy size before a row is read: what training would refuse is refused then.

Whether attention can be exchanged, whether a model brings a mask of its own, and whether its head and layers are understood is
proven on the live model when it is prepared (`prepared.py`). For a folder with a `config.json` alone that is after its weights
were made, and for a plan it is never: "fits" was said of models that training refused a minute, or 700 GB of weights, later. A
toy of the same class goes through the same proofs in half a second, so both hear the same sentence, at the start. Families that
the planner knows are proven by the tests, and are not tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from megaspan.attention.seam import work_of
from megaspan.config import SFTConfig
from megaspan.human import UserError
from megaspan.layers.selfcheck import toy_of
from megaspan.model.fill import skeleton
from megaspan.model.forward import backbone_of
from megaspan.model.kinds import refuse_shared_rows
from megaspan.model.limits import check_positions
from megaspan.model.prepared import prepare
from megaspan.model.source import first_line, unreadable
from megaspan.plan.choose import choose
from megaspan.plan.facts import Machine, ModelFacts
from megaspan.rope import read_back, require_exact

if TYPE_CHECKING:
    from megaspan.model.source import Source

_TOKENS = 13


def try_family(source: Source, found: PretrainedConfig, config: SFTConfig) -> None:
    """Train a toy of a model's class for one row, plain and prepared. Draws from no generator of the run.

    Args:
        source: where the model comes from.
        found: its configuration, with what the options replace in it.
        config: the options: `gradient_checkpointing`, `loss_type`, and what makes ranks or documents share a row.

    Raises:
        UserError: training refuses it, or its class cannot be built with this configuration, in training's words.
    """
    try:
        hollow = skeleton(found, torch.float32, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # whatever transformers' constructors do with values that do not go together
        if isinstance(error, RuntimeError | MemoryError) or "meta" in str(error):
            return  # a constructor that wants memory; what the values are worth is seen where there is some
        raise unreadable(source, error) from error
    check_positions(hollow, source.name, config.max_length, wish=config.rope_parameters)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        toy = _running(hollow)
        if toy is None:  # the sizes of this family are not known here: what its modules show has to do
            work_of(hollow)
            backbone_of(hollow)
            return
        toy.config.output_router_logits = getattr(found, "output_router_logits", False)
        _train(toy, config)


def _running(hollow: PreTrainedModel) -> PreTrainedModel | None:
    """A toy that plain transformers trains; None where it does not."""
    try:
        toy = toy_of(hollow)
        _row(toy)
    except Exception:  # whatever somebody's model code raises at toy size
        return None
    return toy


def _train(toy: PreTrainedModel, config: SFTConfig) -> None:
    """One row of a prepared toy.

    Raises:
        UserError: it is refused, or does not run.
    """
    packed = config.packing and config.packing_strategy == "bfd"
    wished = {"gradient_checkpointing": config.gradient_checkpointing, "loss_type": config.loss_type}
    args = SFTConfig(**wished, max_length=_TOKENS, allow_past_window=True, use_cpu=True)  # type: ignore[arg-type]
    machine = Machine("CPU", 0, 2**40, 1)
    try:
        require_exact(read_back(toy))
        prepare(toy, args, choose(args, ModelFacts.from_config(toy.config.to_dict()), machine))
        if packed or (config.cp_size or 1) * (config.sp_size or 1) > 1:
            refuse_shared_rows(toy)
        _row(toy)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{type(toy).__name__} trains in plain transformers, and not with long attention: "
            f"{type(error).__name__}: {first_line(error)}",
            do="Report the model; it cannot be trained here yet",
        ) from error


def _row(model: Any) -> None:
    """Forward and backward of a row."""
    ids = torch.arange(1, _TOKENS + 1)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
