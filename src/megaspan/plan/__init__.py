"""Bytes and seconds of a run, before anything is loaded, and the choices that follow from them. Never imports torch."""

from megaspan.plan.facts import Machine as Machine
from megaspan.plan.facts import ModelFacts as ModelFacts
from megaspan.plan.facts import model_facts as model_facts

__all__ = ["Machine", "ModelFacts", "model_facts"]
