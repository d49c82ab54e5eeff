"""Published checkpoints: one table per family, and no forward of their own."""

from jaxformer.hf.families import FAMILIES
from jaxformer.hf.family import Family, Field, Rule
from jaxformer.hf.layout import Source
from jaxformer.hf.load import load
from jaxformer.hf.save import check_save, save

__all__ = ["FAMILIES", "Family", "Field", "Rule", "Source", "check_save", "load", "save"]
