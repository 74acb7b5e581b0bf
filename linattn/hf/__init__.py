"""Hugging Face classes of :mod:`linattn.models`: importing this module registers the model with the Auto classes."""

from linattn.extras import missing

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(missing("transformers", "linattn.hf"), name="transformers") from None

from linattn.hf import quantizer as quantizer
from linattn.hf.cache import StateCache as StateCache
from linattn.hf.config import LMConfig as LMConfig
from linattn.hf.load import export as export
from linattn.hf.load import load as load
from linattn.hf.model import LinattnForCausalLM as LinattnForCausalLM
from linattn.hf.model import LinattnModel as LinattnModel

AutoConfig.register(LMConfig.model_type, LMConfig, exist_ok=True)
AutoModel.register(LMConfig, LinattnModel, exist_ok=True)
AutoModelForCausalLM.register(LMConfig, LinattnForCausalLM, exist_ok=True)
