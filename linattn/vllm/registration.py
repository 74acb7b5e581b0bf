"""Registration of the models of this library with vLLM and transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig
from vllm import ModelRegistry
from vllm.config import CUDAGraphMode
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig

from linattn.hf import LMConfig
from linattn.vllm import states
from linattn.vllm.config import HYBRID, STATES, UNKNOWN_TO_VLLM, served_config


class Checks(MambaModelConfig):
    """Settings of vLLM for the models of this library."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """Refuse unsupported settings, and let requests name state files.

        Raises:
            ValueError: with the setting and the reason.
        """
        if reason := _refusal(vllm_config):
            raise ValueError(f"linattn models in vLLM: {reason}")
        super().verify_and_update_config(vllm_config)
        model = vllm_config.model_config
        if vllm_config.speculative_config is None and model.runner_type == "generate":
            given = list(model.logits_processors or [])
            model.logits_processors = given + ([] if states.PROCESSOR in given else [states.PROCESSOR])
        if states.folder() is not None:
            vllm_config.scheduler_config.async_scheduling = False  # otherwise a state may have read a token after the end
            vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE  # a graph would not copy the states of single rows


def register() -> None:
    """Register configs, models and checks; may be called many times."""
    for model_type in (LMConfig.model_type, *UNKNOWN_TO_VLLM):
        AutoConfig.register(model_type, served_config(model_type), exist_ok=True)
    for architecture in (STATES, HYBRID):
        ModelRegistry.register_model(architecture, f"linattn.vllm.model:{architecture}")
        MODELS_CONFIG_MAP[architecture] = Checks


def _refusal(vllm_config: Any) -> str | None:
    """Reason why these settings are not supported, or None if they are."""
    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(parallel, name)) != 1:
            return f"{name} must be 1, but came as {size}"
    if model.quantization is not None:
        return f"quantization must be None, but came as {model.quantization!r}"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is not supported: vLLM cannot roll back states"
    if cache.mamba_cache_mode == "all":
        return "mamba_cache_mode must be 'align' or 'none', but came as 'all'"
    if states.folder() is None:
        return None
    if cache.enable_prefix_caching:
        return f"{states.VARIABLE} needs --no-enable-prefix-caching: the prompt after a state is not a prefix of other prompts"
    return f"{states.VARIABLE} needs a model of constant states, but this one has softmax layers" if model.is_hybrid else None
