"""Stacks of mixers and feed-forwards: one language backbone for every mixer."""

from linattn.models.config import LMConfig as LMConfig
from linattn.models.language import Backbone as Backbone
from linattn.models.language import LanguageModel as LanguageModel
