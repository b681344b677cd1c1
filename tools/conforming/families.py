"""The rows of the table: families in wide use, tiny, of random weights.

What a family does with its cache does not depend on its size. Windows, chunks and index counts are smaller than
the prompts, so that every family runs past them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tieredkv.cli.model import local_copy

from .family import HYBRID, RECURRENT, VOCABULARY, Family

Settings = Mapping[str, Any]

_WINDOW = 24
_TOKENS: Settings = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BASE: Settings = {
    **_TOKENS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
_SLIDING: Settings = {**_BASE, "head_dim": 16, "sliding_window": _WINDOW}
_ALTERNATING: Settings = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 2}
_SHARING: Settings = {
    **_ALTERNATING, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
_EXPERTS: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS: Settings = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: Settings = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT: Settings = {
    **_BASE, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, **_ROUTED,
}  # fmt: skip
# Scores are sums of rectified products: with few heads many are exactly zero, and whom `topk` takes among equals
# depends on how the calls were cut, with any cache. Real models have 32 heads and more.
_INDEXED: Settings = {**_LATENT, "index_topk": 24, "index_n_heads": 16, "index_head_dim": 16}
_MAMBA: Settings = {
    **_BASE, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}  # fmt: skip
_DELTA: Settings = {
    **_BASE, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_PURE: Settings = {**_TOKENS, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 16}
_VISION: Settings = {
    "vision_config": {
        "depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "intermediate_size": 32,
    },
    "image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253,
}  # fmt: skip
_MROPE: Settings = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
}
_OLD_NAMES: Settings = {**_TOKENS, "n_layer": 4, "n_head": 4}
# Some with a head that is their embedding say the last token again for ever, whatever a cache holds.
_OWN_HEAD: Settings = {"tie_word_embeddings": False}

_NAMED = (
    Family("GPT-2", "GPT2", {**_OLD_NAMES, "n_embd": 64, "n_positions": 1024}, model="LMHeadModel"),
    Family("Llama", "Llama", _BASE, in_new_process=True),
    Family("Qwen3", "Qwen3", {**_BASE, "head_dim": 16}),
    Family("Mistral, sliding", "Mistral", _SLIDING),
    Family("Gemma 3", "Gemma3", {**_ALTERNATING, **_OWN_HEAD}, config="TextConfig", in_new_process=True),
    Family("Gemma 4", "Gemma4", {**_SHARING, "global_head_dim": 16}, config="TextConfig"),
    Family("gpt-oss", "GptOss", {**_SLIDING, **_LOCAL_EXPERTS}),
    Family("DeepSeek-V3", "DeepseekV3", _LATENT),
    Family("GLM-MoE-DSA", "GlmMoeDsa", _INDEXED),
    Family("Qwen3-Next", "Qwen3Next", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32}, HYBRID),
    Family("Jamba", "Jamba", {
        **_BASE, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8,
        "mamba_dt_rank": 8, "use_mamba_kernels": False,
    }, HYBRID, step=1),
    Family("Bamba", "Bamba", {**_MAMBA, "attn_layer_indices": [1, 3]}, HYBRID, in_new_process=True),
    Family("Falcon-H1", "FalconH1", {**_MAMBA, "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4}, HYBRID),
    Family("LFM2", "Lfm2", {**_BASE, "layer_types": ["conv", "full_attention"] * 2}, HYBRID),
    Family("Mamba", "Mamba", _PURE, RECURRENT, step=1),
    Family("Mamba2", "Mamba2", {
        **_PURE, "num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2, "chunk_size": 8,
    }, RECURRENT),
    Family("DeepSeek-V4", "DeepseekV4", {
        **_TOKENS, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16,
        "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 16, "sliding_window": _WINDOW, "index_topk": 4,
        "index_n_heads": 16, "index_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "max_position_embeddings": 1024, "partial_rotary_factor": 0.5,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    }, HYBRID),
    Family("Qwen2-VL", "Qwen2VL", {**_BASE, **_MROPE}, model="ForConditionalGeneration", vision=_VISION),
)  # fmt: skip

_IN_WIDE_USE = (
    Family("Qwen2", "Qwen2", _BASE),
    Family("Qwen3-MoE", "Qwen3Moe", {**_BASE, "head_dim": 16, **_EXPERTS}),
    Family("Mixtral", "Mixtral", {**_BASE, **_LOCAL_EXPERTS, "sliding_window": None}),
    Family("Phi-3", "Phi3", {**_BASE, "sliding_window": None}),
    Family("Gemma 2", "Gemma2", _ALTERNATING),
    Family("Gemma 3n", "Gemma3n", {
        **_SHARING, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4,
    }, config="TextConfig"),
    Family("Llama 4", "Llama4", {
        **_BASE, "head_dim": 16, "attention_chunk_size": _WINDOW, "num_local_experts": 2,
        "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 1, 0],
    }, config="TextConfig"),
    Family("OLMo 2", "Olmo2", _BASE),
    Family("OLMo 3", "Olmo3", _ALTERNATING),
    Family("Cohere 2", "Cohere2", {**_ALTERNATING, "logit_scale": 1.0}),
    Family("GLM-4", "Glm4", {**_BASE, "head_dim": 16}),
    Family("GLM-4-MoE", "Glm4Moe", {**_BASE, "head_dim": 16, **_ROUTED, "use_qk_norm": True}),
    Family("Granite", "Granite", _BASE),
    Family("SmolLM3", "SmolLM3", _BASE),
    Family("Ernie 4.5", "Ernie4_5", {**_BASE, "head_dim": 16}),
    Family("Exaone 4", "Exaone4", _ALTERNATING),
    Family("Hunyuan", "HunYuanDenseV1", {**_BASE, "head_dim": 16}),
    Family("MiniMax-M2", "MiniMaxM2", {**_BASE, "head_dim": 16, **_LOCAL_EXPERTS}),
    Family("DeepSeek-V3.2", "DeepseekV32", _INDEXED),
    Family("LongCat-Flash", "LongcatFlash", {
        **_LATENT, "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32,
        "moe_topk": 2, "zero_expert_num": 1, "head_dim": 8,
    }),
    Family("GPT-NeoX", "GPTNeoX", _BASE),
    Family("Starcoder2", "Starcoder2", _BASE),
    Family("BLOOM", "Bloom", {**_OLD_NAMES, **_OWN_HEAD, "hidden_size": 64}),
    Family("Qwen3.5", "Qwen3_5", _DELTA, HYBRID, config="TextConfig"),
    # Both experts: with one of two, a router near a tie takes the other when calls are cut elsewhere, with any cache.
    Family("Granite 4, hybrid", "GraniteMoeHybrid", {
        **_MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    }, HYBRID),
    Family("Nemotron-H", "NemotronH", {
        **_BASE, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1,
        "ssm_state_size": 16, "chunk_size": 8, "layers_block_type": ["mamba", "attention"] * 2,
        "use_mamba_kernels": False,
    }, HYBRID),
    Family("Zamba2", "Zamba2", {
        **_BASE, "mamba_d_state": 16, "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 8,
        "num_mem_blocks": 1, "hybrid_layer_ids": [1, 3], "layers_block_type": ["mamba", "hybrid"] * 2,
        "use_mamba_kernels": False,
    }, HYBRID),
    Family("Kimi Linear", "KimiLinear", {
        **_LATENT, "num_local_experts": 4, "linear_head_dim": 16, "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }, HYBRID),
    Family("RecurrentGemma", "RecurrentGemma", {
        **_BASE, "lru_width": 64, "attention_window_size": _WINDOW,
    }, HYBRID),
    Family("MiniMax-01", "MiniMax", {
        **_BASE, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 16,
    }, HYBRID),
    Family("Falcon-Mamba", "FalconMamba", _PURE, RECURRENT, step=1),
    Family("RWKV", "Rwkv", _PURE, RECURRENT),
)  # fmt: skip

_REAL = Family(
    "Gemma 3 270M", "Gemma3", {}, config="TextConfig", weights=local_copy(), words=range(1_000, 200_000),
    num_more=560, in_new_process=True,
)  # fmt: skip

FAMILIES = (*_NAMED, *_IN_WIDE_USE, _REAL)  # it takes as long as all others together
