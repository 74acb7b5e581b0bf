"""Stacks of mixers and feed-forwards: one language backbone for every mixer, one model of images."""

from linattn.models.config import LMConfig as LMConfig
from linattn.models.language import Backbone as Backbone
from linattn.models.language import LanguageModel as LanguageModel
from linattn.models.vision import ImageConfig as ImageConfig
from linattn.models.vision import ImageModel as ImageModel
