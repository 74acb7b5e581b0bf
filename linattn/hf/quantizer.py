"""Quantised folders for ``from_pretrained``: transformers asks a registered quantizer to prepare the model for the weights."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from linattn.models import quantised


class QuantizationConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a folder written by :func:`linattn.quantization.save`: the format of each quantised layer."""

    def __init__(self, modules: Any = None, quant_method: str = quantised.METHOD) -> None:
        self.quant_method, self.modules = quant_method, modules  # type: ignore[assignment]


class Quantizer(HfQuantizer):
    """Puts quantised layers in place before the weights are read; the loaded model is that of :func:`linattn.load`."""

    is_trainable = True  # adapters beside the frozen weights

    def __init__(self, quantization_config: QuantizationConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise ValueError("quantization_config must be None, because linattn.quantize quantises a loaded model")

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        quantised.prepare(model, self.quantization_config.to_dict())
        model._tied_weights_keys = model.all_tied_weights_keys = {}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> nn.Module:
        self.remove_quantization_config(model)
        quantised.tie(model)
        model.config.quantization_config = quantised.config_of(model)
        return model


AUTO_QUANTIZATION_CONFIG_MAPPING[quantised.METHOD] = QuantizationConfig
AUTO_QUANTIZER_MAPPING[quantised.METHOD] = Quantizer
