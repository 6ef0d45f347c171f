"""Where a default here is another than in TRL, in the words of the run header.

Somebody who moves a run from `trl sft` keeps the file and gets these differences without having typed them, so the header says
which of them are in use.
"""

from __future__ import annotations

from typing import Any

from megaspan.config import checks, foreign
from megaspan.config.schema import SFTConfig


def differing_defaults(config: SFTConfig) -> list[str]:
    """One line for each default in use that is another in TRL, and for each word that means something else there."""
    idle = checks.idle_options(config)
    lines = [
        f"{name}: {shown(name, getattr(config, name))} (TRL: {as_yaml(entry['trl'])}); {entry['differs']}"
        for name, entry in (foreign.table()["supported"] | foreign.table()["own"]).items()
        if "differs" in entry and name not in idle and not _chosen(config, name)
    ]
    if config.loss_type == "nll":
        lines.append("loss_type: nll is the plain loss with all logits here; newer TRL means the chunked one by it")
    return lines


def _chosen(config: SFTConfig, name: str) -> bool:
    if name == "gradient_checkpointing_kwargs":
        return "offload" in (config.gradient_checkpointing_kwargs or {})
    return name in config.model_fields_set


def shown(name: str, value: Any) -> str:
    """A value of an option as a file would hold it; the mapping that is meant where the option itself is null."""
    return "{offload: true}" if name == "gradient_checkpointing_kwargs" and value is None else as_yaml(value)


def as_yaml(value: Any) -> str:
    """A scalar or small value in YAML's spelling."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and value != 0 and abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:g}" if isinstance(value, float) else str(value)
