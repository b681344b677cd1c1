"""Tiny random models of real configuration classes."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T

BASE: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention"] * 2


def build(config: Any, kind: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():  # random weights as they come give flat logits
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4.0)
    if model.can_generate():
        model.generation_config.eos_token_id = None
    return model.to(dtype)


def llama(**kw: Any) -> Any:
    return build(T.LlamaConfig(**{**BASE, **kw}), T.LlamaForCausalLM)


def qwen3(**kw: Any) -> Any:
    return build(T.Qwen3Config(**{**BASE, "head_dim": 16, **kw}), T.Qwen3ForCausalLM)


def gpt2(**kw: Any) -> Any:
    config = T.GPT2Config(
        vocab_size=264, n_embd=64, n_layer=4, n_head=4, n_positions=1024, pad_token_id=0, **kw
    )
    return build(config, T.GPT2LMHeadModel)


def mistral(window: int = 40, **kw: Any) -> Any:
    return build(T.MistralConfig(**{**BASE, "sliding_window": window, **kw}), T.MistralForCausalLM)


def gemma3(window: int = 8, **kw: Any) -> Any:
    own = {"head_dim": 16, "sliding_window": window, "layer_types": ALTERNATING}
    return build(T.Gemma3TextConfig(**{**BASE, **own, **kw}), T.Gemma3ForCausalLM)


def gemma4(window: int = 8, **kw: Any) -> Any:
    own = {
        "head_dim": 16, "global_head_dim": 16, "sliding_window": window, "layer_types": ALTERNATING,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 264,
    }  # fmt: skip
    return build(T.Gemma4TextConfig(**{**BASE, **own, **kw}), T.Gemma4ForCausalLM)


def gpt_oss(window: int = 40, **kw: Any) -> Any:
    own = {"head_dim": 16, "sliding_window": window, "num_local_experts": 4, "num_experts_per_tok": 2}
    return build(T.GptOssConfig(**{**BASE, **own, **kw}), T.GptOssForCausalLM)


def deepseek_v3(**kw: Any) -> Any:
    own = {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    }  # fmt: skip
    return build(T.DeepseekV3Config(**{**BASE, **own, **kw}), T.DeepseekV3ForCausalLM)


LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 8,
}  # fmt: skip
SMALL = {name: BASE[name] for name in ("vocab_size", "hidden_size", "pad_token_id")} | {
    "num_hidden_layers": 3
}


def qwen3_next(**kw: Any) -> Any:
    config = T.Qwen3NextConfig(**{**BASE, "head_dim": 16, **LINEAR, **EXPERTS, **kw})
    return build(config, T.Qwen3NextForCausalLM)


def jamba(**kw: Any) -> Any:
    own = {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    }  # fmt: skip
    return build(T.JambaConfig(**{**BASE, **own, **kw}), T.JambaForCausalLM)


def bamba(**kw: Any) -> Any:
    config = T.BambaConfig(**{**BASE, **MAMBA, "attn_layer_indices": [1, 3], **kw})
    return build(config, T.BambaForCausalLM)


def falcon_h1(**kw: Any) -> Any:
    own = {**MAMBA, "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4}
    return build(T.FalconH1Config(**{**BASE, **own, **kw}), T.FalconH1ForCausalLM)


def lfm2(**kw: Any) -> Any:
    config = T.Lfm2Config(**{**BASE, "layer_types": ["conv", "full_attention"] * 2, **kw})
    return build(config, T.Lfm2ForCausalLM)


def mamba(**kw: Any) -> Any:
    return build(T.MambaConfig(**{**SMALL, "state_size": 16, **kw}), T.MambaForCausalLM)


def mamba2(**kw: Any) -> Any:
    own = {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2, "chunk_size": 8}
    return build(T.Mamba2Config(**{**SMALL, **own, **kw}), T.Mamba2ForCausalLM)


def nemotron_h(**kw: Any) -> Any:
    own = {
        "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1,
        "chunk_size": 8, "layers_block_type": ["mamba", "attention"] * 2,
    }  # fmt: skip
    return build(T.NemotronHConfig(**{**BASE, **own, **kw}), T.NemotronHForCausalLM)


def qwen3_5(**kw: Any) -> Any:
    config = T.Qwen3_5TextConfig(**{**BASE, "head_dim": 16, **LINEAR, **kw})
    return build(config, T.Qwen3_5ForCausalLM)


def granite_hybrid(**kw: Any) -> Any:
    own = {
        **MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 64,
    }  # fmt: skip
    return build(T.GraniteMoeHybridConfig(**{**BASE, **own, **kw}), T.GraniteMoeHybridForCausalLM)


def zamba(**kw: Any) -> Any:
    own = {
        "num_hidden_layers": 6, "num_key_value_heads": 4, "attn_layer_period": 3, "attn_layer_offset": 2,
        "mamba_d_state": 8, "mamba_dt_rank": 8, "n_mamba_heads": 2, "use_mamba_kernels": False,
    }  # fmt: skip
    return build(T.ZambaConfig(**{**BASE, **own, **kw}), T.ZambaForCausalLM)


def zaya(window: int = 24, **kw: Any) -> Any:
    own = {
        "head_dim": 16, "sliding_window": window, "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "moe_intermediate_size": 32, "num_experts": 4, "router_hidden_size": 16,
    }  # fmt: skip
    base = {name: value for name, value in BASE.items() if name != "intermediate_size"}
    return build(T.ZayaConfig(**{**base, **own, **kw}), T.ZayaForCausalLM)


MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
INDEXER = {"index_topk": 24, "index_n_heads": 2, "index_head_dim": 16}


def glm_moe_dsa(**kw: Any) -> Any:
    return build(T.GlmMoeDsaConfig(**{**BASE, **MLA, **INDEXER, **kw}), T.GlmMoeDsaForCausalLM)


def deepseek_v32(**kw: Any) -> Any:
    return build(T.DeepseekV32Config(**{**BASE, **MLA, **INDEXER, **kw}), T.DeepseekV32ForCausalLM)


def deepseek_v4(window: int = 24, **kw: Any) -> Any:
    own = {
        **INDEXER, "head_dim": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 16,
        "sliding_window": window, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "layer_types": [
            "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 64},
    }  # fmt: skip
    return build(T.DeepseekV4Config(**{**BASE, **own, **kw}), T.DeepseekV4ForCausalLM)


def llama4(chunk: int = 40, **kw: Any) -> Any:
    own = {
        "head_dim": 16, "attention_chunk_size": chunk, "num_local_experts": 2, "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
    }  # fmt: skip
    return build(T.Llama4TextConfig(**{**BASE, **own, **kw}), T.Llama4ForCausalLM)


def gemma3n(window: int = 8, **kw: Any) -> Any:
    own = {
        "head_dim": 16, "sliding_window": window, "layer_types": ALTERNATING, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 264, "laurel_rank": 8,
        "altup_num_inputs": 2, "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4,
    }  # fmt: skip
    return build(T.Gemma3nTextConfig(**{**BASE, **own, **kw}), T.Gemma3nForCausalLM)


def qwen2_5_vl(**kw: Any) -> Any:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = T.Qwen2_5_VLConfig(
        text_config={**BASE, "rope_parameters": rope, **kw}, vision_config=vision, image_token_id=5,
        video_token_id=6, vision_start_token_id=3, vision_end_token_id=4, vocab_size=264,
    )  # fmt: skip
    return build(config, T.Qwen2_5_VLForConditionalGeneration)


FAMILIES = {
    "llama": llama, "qwen3": qwen3, "gpt2": gpt2, "mistral": mistral, "gemma3": gemma3,
    "gemma4": gemma4, "gpt_oss": gpt_oss, "deepseek_v3": deepseek_v3,
}  # fmt: skip
RECURRENT = {
    "mamba2": mamba2, "jamba": jamba, "qwen3_next": qwen3_next, "lfm2": lfm2, "bamba": bamba,
    "falcon_h1": falcon_h1, "mamba": mamba, "nemotron_h": nemotron_h, "qwen3_5": qwen3_5,
    "granite_hybrid": granite_hybrid, "zamba": zamba, "zaya": zaya,
}  # fmt: skip
"""Families whose states are right at one place alone, with and without attention beside them."""
MORE = {
    "glm_moe_dsa": glm_moe_dsa, "deepseek_v32": deepseek_v32, "llama4": llama4, "gemma3n": gemma3n,
    "qwen2_5_vl": qwen2_5_vl,
}  # fmt: skip
"""Families with attention alone whose layers hold something else than most."""
POOLING = {"deepseek_v4": deepseek_v4}
"""Families that pool tokens into rows, by their position."""
WINDOWED = ("mistral", "gemma3", "gemma4", "gpt_oss")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(template: str | None = CHAT_TEMPLATE) -> Any:
    """A tokenizer of bytes: ids 0 to 7 are special, 8 + b is byte b."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<unk>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(special + letters)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(t, special=True) for t in special])
    fast = T.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=special[3:7],
    )  # fmt: skip
    fast.chat_template = template
    return fast


def prompt(num_tokens: int, seed: int = 1) -> torch.Tensor:
    """Random ids `[1, num_tokens]`, none of them special."""
    return torch.randint(8, 264, (1, num_tokens), generator=torch.Generator().manual_seed(seed))
