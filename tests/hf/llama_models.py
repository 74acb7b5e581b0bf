"""Llama and its relatives: small configs with each option, and settings of published configs beyond the class's defaults."""

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}

MODELS = {
    "llama": [
        {**_HEADS, "num_hidden_layers": 2, "tie_word_embeddings": True},
        {
            **_HEADS, "num_hidden_layers": 2, "attention_bias": True, "head_dim": 12, "rope_parameters": LLAMA3,
            "max_position_embeddings": 256,
        },
    ],
    "mistral": [
        {**_HEADS, "num_hidden_layers": 2, "sliding_window": 9},
        {**_HEADS, "num_hidden_layers": 1, "sliding_window": None, "rope_parameters": LINEAR},
    ],
    "qwen2": [
        {
            **_HEADS, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        {**_HEADS, "num_hidden_layers": 1, "rope_parameters": YARN, "max_position_embeddings": 64},
    ],
    "qwen3": [{**_HEADS, "num_hidden_layers": 2, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}],
    "gemma3_text": [
        {**_HEADS, "num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9},
        {
            **_HEADS, "num_hidden_layers": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9,
            "final_logit_softcapping": 2.0, "layer_types": ["sliding_attention"] * 2, "tie_word_embeddings": False,
        },
        {
            **_HEADS, "num_hidden_layers": 2, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
            },
        },
    ],
}  # fmt: skip

PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "num_hidden_layers": 30, "vocab_size": 49152, "rope_theta": 100000, "tie_word_embeddings": True,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_scaling": None, "pretraining_tp": 1,
    },
    "meta-llama/Llama-3.2-1B": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "num_hidden_layers": 16, "vocab_size": 128256, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "max_position_embeddings": 131072, "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "mistralai/Mistral-7B-v0.1": {"model_type": "mistral", "sliding_window": 4096, "rms_norm_eps": 1e-5},
    "Qwen/Qwen2.5-0.5B": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        "num_hidden_layers": 24, "max_window_layers": 24, "use_sliding_window": False, "sliding_window": 32768,
        "rope_theta": 1000000.0, "tie_word_embeddings": True, "use_mrope": False,
    },
    "Qwen/Qwen3-0.6B": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_hidden_layers": 28, "head_dim": 128, "rope_theta": 1000000, "tie_word_embeddings": True, "max_window_layers": 28,
    },
    "google/gemma-3-270m": {
        "model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1,
        "num_hidden_layers": 18, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512, "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0, "rope_scaling": None, "_sliding_window_pattern": 6,
    },
}  # fmt: skip
