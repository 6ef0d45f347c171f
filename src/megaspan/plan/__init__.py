"""Bytes and seconds of a run, before anything is loaded, and the choices that follow from them. Never imports torch."""

from megaspan.plan.choose import Plan as Plan
from megaspan.plan.choose import choose as choose
from megaspan.plan.choose import free_disk as free_disk
from megaspan.plan.choose import plan_command as plan_command
from megaspan.plan.facts import Machine as Machine
from megaspan.plan.facts import ModelFacts as ModelFacts
from megaspan.plan.facts import model_facts as model_facts
from megaspan.plan.plain import has_plain_adapter as has_plain_adapter
from megaspan.plan.plain import is_plain as is_plain
from megaspan.plan.ranks import RankSizes as RankSizes

__all__ = [
    "Machine",
    "ModelFacts",
    "Plan",
    "RankSizes",
    "choose",
    "free_disk",
    "has_plain_adapter",
    "is_plain",
    "model_facts",
    "plan_command",
]
