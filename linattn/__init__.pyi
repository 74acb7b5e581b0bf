"""What ``linattn`` offers, for who reads types: the module itself loads each name when it is asked for."""

from linattn import data as data, ffn as ffn, generate as generate, hf as hf, mixers as mixers, models as models, ops as ops
from linattn import parallel as parallel, report as report, state as state, train as train
from linattn.distill.conversion import convert as convert
from linattn.hf.fla import patch_fla as patch_fla
from linattn.hf.load import load as load
from linattn.hf.patch import patch_transformers as patch_transformers
from linattn.mixers import Mixer as Mixer, Recurrence as Recurrence, register as register
from linattn.mixers import check_forms as check_forms, cost as cost, mixing_matrix as mixing_matrix
from linattn.models import LanguageModel as LanguageModel, LMConfig as LMConfig
from linattn.ops import debug as debug, explain as explain, linear_attention as linear_attention, long_conv as long_conv, lti as lti
from linattn.ops import diagonal_scan as diagonal_scan, running_max as running_max, selective_scan as selective_scan
from linattn.quantization import quantize as quantize
from linattn.state import State as State

__version__: str
