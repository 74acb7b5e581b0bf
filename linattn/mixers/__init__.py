"""How a sequence becomes (q, k, v, decay, ...) and back: one file per system."""

from linattn.mixers.attention import bahdanau as _bahdanau  # noqa: F401
from linattn.mixers.attention import conformer as _conformer  # noqa: F401
from linattn.mixers.attention import fox as _fox  # noqa: F401
from linattn.mixers.attention import hard_attention as _hard_attention  # noqa: F401
from linattn.mixers.attention import mla as _mla  # noqa: F401
from linattn.mixers.attention import path as _path  # noqa: F401
from linattn.mixers.attention import softmax as _softmax  # noqa: F401  (importing registers)
from linattn.mixers.attention import topk as _topk  # noqa: F401
from linattn.mixers.attention import transformer_xl as _transformer_xl  # noqa: F401
from linattn.mixers.base import Mixer as Mixer
from linattn.mixers.base import Recurrence as Recurrence
from linattn.mixers.carry import Carry as Carry
from linattn.mixers.cost import Cost as Cost
from linattn.mixers.cost import cost as cost
from linattn.mixers.cross import kernel as _cross_kernel  # noqa: F401
from linattn.mixers.cross import softmax as _cross_softmax  # noqa: F401
from linattn.mixers.decay import dfw as _dfw  # noqa: F401
from linattn.mixers.decay import gated_retnet as _gated_retnet  # noqa: F401
from linattn.mixers.decay import gateloop as _gateloop  # noqa: F401
from linattn.mixers.decay import gla as _gla  # noqa: F401
from linattn.mixers.decay import hgrn as _hgrn  # noqa: F401
from linattn.mixers.decay import hgrn2 as _hgrn2  # noqa: F401
from linattn.mixers.decay import lightning as _lightning  # noqa: F401
from linattn.mixers.decay import log_linear as _log_linear  # noqa: F401
from linattn.mixers.decay import mamba2 as _mamba2  # noqa: F401
from linattn.mixers.decay import mamba3 as _mamba3  # noqa: F401
from linattn.mixers.decay import mlstm as _mlstm  # noqa: F401
from linattn.mixers.decay import mlstm_block as _mlstm_block  # noqa: F401
from linattn.mixers.decay import retnet as _retnet  # noqa: F401
from linattn.mixers.delta import comba as _comba  # noqa: F401
from linattn.mixers.delta import deltanet as _deltanet  # noqa: F401
from linattn.mixers.delta import deltaproduct as _deltaproduct  # noqa: F401
from linattn.mixers.delta import gated_deltanet as _gated_deltanet  # noqa: F401
from linattn.mixers.delta import kda as _kda  # noqa: F401
from linattn.mixers.delta import mesanet as _mesanet  # noqa: F401
from linattn.mixers.delta import titans as _titans  # noqa: F401
from linattn.mixers.delta import titans_attention as _titans_attention  # noqa: F401
from linattn.mixers.delta import ttt as _ttt  # noqa: F401
from linattn.mixers.inspect import check_forms as check_forms
from linattn.mixers.inspect import mixing_matrix as mixing_matrix
from linattn.mixers.kernel import base_conv as _base_conv  # noqa: F401
from linattn.mixers.kernel import based as _based  # noqa: F401
from linattn.mixers.kernel import cosformer as _cosformer  # noqa: F401
from linattn.mixers.kernel import efficient_attention as _efficient_attention  # noqa: F401
from linattn.mixers.kernel import gaussian as _gaussian  # noqa: F401
from linattn.mixers.kernel import hedgehog as _hedgehog  # noqa: F401
from linattn.mixers.kernel import linear as _linear  # noqa: F401
from linattn.mixers.kernel import linear_transformer as _linear_transformer  # noqa: F401
from linattn.mixers.kernel import linrec as _linrec  # noqa: F401
from linattn.mixers.kernel import performer as _performer  # noqa: F401
from linattn.mixers.kernel import polynomial as _polynomial  # noqa: F401
from linattn.mixers.kernel import rebased as _rebased  # noqa: F401
from linattn.mixers.kernel import relu_attention as _relu_attention  # noqa: F401
from linattn.mixers.kernel import rfa as _rfa  # noqa: F401
from linattn.mixers.kernel import taylor as _taylor  # noqa: F401
from linattn.mixers.kinds import CrossMixer as CrossMixer
from linattn.mixers.kinds import FeedForward as FeedForward
from linattn.mixers.kinds import GridMixer as GridMixer
from linattn.mixers.kinds import Resampler as Resampler
from linattn.mixers.kinds import create_bidirectional as create_bidirectional
from linattn.mixers.kinds import over_grid as over_grid
from linattn.mixers.memory import charformer as _charformer  # noqa: F401
from linattn.mixers.memory import etc as _etc  # noqa: F401
from linattn.mixers.memory import funnel as _funnel  # noqa: F401
from linattn.mixers.memory import linformer as _linformer  # noqa: F401
from linattn.mixers.memory import nystromformer as _nystromformer  # noqa: F401
from linattn.mixers.memory import perceiver as _perceiver  # noqa: F401
from linattn.mixers.memory import set_transformer as _set_transformer  # noqa: F401
from linattn.mixers.memory import swin as _swin  # noqa: F401
from linattn.mixers.pattern import axial as _axial  # noqa: F401
from linattn.mixers.pattern import blockwise as _blockwise  # noqa: F401
from linattn.mixers.pattern import cluster_former as _cluster_former  # noqa: F401
from linattn.mixers.pattern import clustered as _clustered  # noqa: F401
from linattn.mixers.pattern import local as _local  # noqa: F401
from linattn.mixers.pattern import local_2d as _local_2d  # noqa: F401
from linattn.mixers.pattern import longformer as _longformer  # noqa: F401
from linattn.mixers.pattern import memory_compressed as _memory_compressed  # noqa: F401
from linattn.mixers.pattern import reformer as _reformer  # noqa: F401
from linattn.mixers.pattern import routing as _routing  # noqa: F401
from linattn.mixers.pattern import sinkhorn as _sinkhorn  # noqa: F401
from linattn.mixers.pattern import sparse_transformer as _sparse_transformer  # noqa: F401
from linattn.mixers.recurrent import gru as _gru  # noqa: F401
from linattn.mixers.recurrent import lstm as _lstm  # noqa: F401
from linattn.mixers.recurrent import rnn as _rnn  # noqa: F401
from linattn.mixers.recurrent import slstm as _slstm  # noqa: F401
from linattn.mixers.registry import available as available
from linattn.mixers.registry import create as create
from linattn.mixers.registry import info as info
from linattn.mixers.registry import register as register
from linattn.mixers.rwkv import channel as _rwkv_channel  # noqa: F401
from linattn.mixers.rwkv import rwkv4 as _rwkv4  # noqa: F401
from linattn.mixers.rwkv import rwkv6 as _rwkv6  # noqa: F401
from linattn.mixers.rwkv import rwkv7 as _rwkv7  # noqa: F401
from linattn.mixers.ssm import h3 as _h3  # noqa: F401
from linattn.mixers.ssm import lru as _lru  # noqa: F401
from linattn.mixers.ssm import mamba as _mamba  # noqa: F401
from linattn.mixers.ssm import rg_lru as _rg_lru  # noqa: F401
from linattn.mixers.ssm import s4 as _s4  # noqa: F401
from linattn.mixers.ssm import s4d as _s4d  # noqa: F401
from linattn.mixers.ssm import s5 as _s5  # noqa: F401
from linattn.mixers.vision import agent as _agent  # noqa: F401
from linattn.mixers.vision import ca_stream as _ca_stream  # noqa: F401
from linattn.mixers.vision import efficientvit as _efficientvit  # noqa: F401
from linattn.mixers.vision import focused as _focused  # noqa: F401
from linattn.mixers.vision import mobile as _mobile  # noqa: F401
from linattn.mixers.vision import slab as _slab  # noqa: F401
from linattn.mixers.vision import van as _van  # noqa: F401
