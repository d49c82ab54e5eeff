"""The fixtures: one entry a case. Widths, head counts and depths differ wherever a family lets them, so that none can stand for
another; epsilons and bases are not the defaults."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    """The class of transformers."""
    config: dict[str, Any]
    """Keywords of its config."""
    changes: tuple[dict[str, Any], ...] = ()
    """Changes of the config that must be seen in the logits: what the fixture is there to test."""
    gain: float = 1.0
    """What the norms' stored weights lie around; 0 where the family adds 1 to them."""
    embedding: float = 0.3
    """Standard deviation of the embeddings. A tied model that reads more of them than its layers add repeats its input."""
    extra: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Tensors that files of this kind hold and a new model of transformers does not."""
    long: int = 0
    """Length of one more input, past the original context."""
    beams: bool = False
    """Beam search for a decoder-only model. Encoder–decoders always have it."""


SIZES = {"hidden_size": 32, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CAUSAL = SIZES | TOKENS | {"rms_norm_eps": 1e-3, "max_position_embeddings": 64}
GROUPED = CAUSAL | {"num_key_value_heads": 2, "head_dim": 12}
WINDOWS = ({"sliding_window": 5}, {"sliding_window": 7})


def theta(value: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": value, "rope_type": "default"} | more}


def by_layer(full: float, factor: float, sliding: float) -> dict[str, Any]:
    return {
        "full_attention": {"rope_theta": full, "rope_type": "linear", "factor": factor},
        "sliding_attention": {"rope_theta": sliding, "rope_type": "default"},
    }


def llama(*changes: dict[str, Any], long: int = 0, beams: bool = False, **config: Any) -> Case:
    return Case("LlamaForCausalLM", config, changes, long=long, beams=beams)


def scaled(rope_type: str, base: float, length: int, long: int, **more: Any) -> Case:
    config = GROUPED | {"head_dim": 16, "max_position_embeddings": length} | theta(base, rope_type=rope_type, **more)
    return llama(theta(base), theta(base, rope_type=rope_type, **more | {"factor": 3.0}), long=long, **config)


YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 16}
DEEPSEEK = (
    CAUSAL
    | {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4, "kv_lora_rank": 14}
    | {"qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6, "n_routed_experts": 8, "n_shared_experts": 1}
    | {"num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0}
    | {"rope_parameters": YARN | {"rope_theta": 100.0}}
)
DEEPSEEK_CHANGES: tuple[dict[str, Any], ...] = (
    {"rope_interleave": False},
    {"n_group": 1, "topk_group": 1},
    {"norm_topk_prob": False},
    {"routed_scaling_factor": 1.0},
    {"rope_parameters": YARN | {"rope_theta": 100.0, "mscale_all_dim": 0.5}},
    {"num_experts_per_tok": 2},
)
SEQ2SEQ = {
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 44,
    "decoder_ffn_dim": 52,
    "vocab_size": 61,
    "max_position_embeddings": 24,
    "forced_eos_token_id": None,
}
T5 = {
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 44,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": 61,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "layer_norm_epsilon": 1e-3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
T5_CHANGES = ({"relative_attention_max_distance": 16}, {"relative_attention_max_distance": 128}, {"layer_norm_epsilon": 1e-6})
BERT = SIZES | {"max_position_embeddings": 24, "type_vocab_size": 3, "layer_norm_eps": 1e-3, "pad_token_id": 0}
BERT_CHANGES = ({"hidden_act": "gelu_new"}, {"layer_norm_eps": 1e-12}, {"num_attention_heads": 2})

GEMMA: dict[str, float] = {"gain": 0.0, "embedding": 0.12}  # it multiplies its embeddings by sqrt(width)

CASES: dict[str, Case] = {
    "gpt2": Case(
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_inner": 52, "n_layer": 2, "n_head": 4, "n_positions": 24, "vocab_size": 61, **TOKENS}
        | {"layer_norm_epsilon": 1e-3},
        ({"layer_norm_epsilon": 1e-5}, {"activation_function": "gelu"}, {"n_head": 2}),
        beams=True,
    ),
    "llama": llama({"rms_norm_eps": 1e-6}, theta(10000.0), beams=True, **CAUSAL | {"head_dim": 10} | theta(5000.0)),
    "llama_gqa_tied": llama({"rms_norm_eps": 1e-6}, theta(10000.0), **GROUPED | {"tie_word_embeddings": True} | theta(500.0)),
    "llama_rope_linear": scaled("linear", 1000.0, length=64, long=32, factor=4.0),
    "llama_rope_llama3": scaled(
        "llama3",
        500.0,
        length=64,
        long=32,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=2.0,
        original_max_position_embeddings=16,
    ),
    "llama_rope_yarn": scaled("yarn", 100.0, length=64, long=32, factor=4.0, original_max_position_embeddings=16),
    "llama_rope_dynamic": scaled("dynamic", 1000.0, length=20, long=40, factor=4.0),
    "mistral": Case(
        "MistralForCausalLM", GROUPED | {"sliding_window": 6} | theta(5000.0), (*WINDOWS, {"sliding_window": None})
    ),
    "qwen2": Case(
        "Qwen2ForCausalLM",
        CAUSAL | {"num_key_value_heads": 2, "tie_word_embeddings": True} | theta(3000.0),
        ({"rms_norm_eps": 1e-6}, theta(10000.0)),
    ),
    "qwen2_window": Case(
        "Qwen2ForCausalLM",
        CAUSAL
        | {"num_key_value_heads": 2, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 6}
        | {"max_window_layers": 1}
        | theta(3000.0),
        (*WINDOWS, {"max_window_layers": 0}, {"max_window_layers": 2}, {"use_sliding_window": False}),
    ),
    "qwen3": Case("Qwen3ForCausalLM", GROUPED | theta(5000.0), ({"rms_norm_eps": 1e-6}, theta(10000.0))),
    "marian": Case(
        "MarianMTModel",
        SEQ2SEQ
        | {"activation_function": "relu", "scale_embedding": True}
        | {"pad_token_id": 60, "decoder_start_token_id": 60, "eos_token_id": 0},
        ({"scale_embedding": False}, {"activation_function": "swish"}, {"encoder_attention_heads": 2}),
    ),
    "bart": Case(
        "BartForConditionalGeneration",
        # it starts with its end token
        SEQ2SEQ | {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
        ({"scale_embedding": True}, {"activation_function": "gelu_new"}, {"decoder_attention_heads": 4}),
    ),
    "t5_v10": Case("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "relu", "tie_word_embeddings": True}, T5_CHANGES),
    "t5_v11": Case(
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        T5_CHANGES,
        extra={"lm_head.weight": (61, 24)},  # every T5 is tied until it reads another head
    ),
    "gemma": Case(
        "GemmaForCausalLM",
        GROUPED | {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"} | theta(5000.0),
        # transformers reads "gelu" as the tanh form here
        ({"hidden_act": "gelu_python"}, {"rms_norm_eps": 1e-6}),
        **GEMMA,
    ),
    "gemma2": Case(
        "Gemma2ForCausalLM",
        GROUPED
        | {"num_hidden_layers": 3, "sliding_window": 6, "query_pre_attn_scalar": 20, "hidden_activation": "gelu_pytorch_tanh"}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
        | theta(5000.0),
        (*WINDOWS, {"query_pre_attn_scalar": 12}, {"attn_logit_softcapping": None}, {"final_logit_softcapping": None}),
        **GEMMA,
    ),
    "gemma3_text": Case(
        "Gemma3ForCausalLM",
        GROUPED
        | {"num_hidden_layers": 3, "sliding_window": 6, "query_pre_attn_scalar": 20, "hidden_activation": "gelu_pytorch_tanh"}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": by_layer(9000.0, 4.0, 100.0)},
        (
            *WINDOWS,
            {"query_pre_attn_scalar": 12},
            {"layer_types": ["sliding_attention"] * 3},
            {"rope_parameters": by_layer(9000.0, 1.0, 100.0)},
            {"rope_parameters": by_layer(9000.0, 4.0, 9000.0)},
        ),
        **GEMMA,
    ),
    "gpt_neox": Case(
        "GPTNeoXForCausalLM",
        {
            **SIZES,
            **TOKENS,
            "hidden_size": 48,
            "max_position_embeddings": 64,
            "layer_norm_eps": 1e-3,
            "use_parallel_residual": True,
        }
        | theta(5000.0, partial_rotary_factor=0.5),
        ({"use_parallel_residual": False}, theta(5000.0, partial_rotary_factor=1.0), {"hidden_act": "gelu_new"}),
    ),
    "olmo2": Case(
        "Olmo2ForCausalLM", CAUSAL | {"num_key_value_heads": 2} | theta(5000.0), ({"rms_norm_eps": 1e-6}, theta(10000.0))
    ),
    "phi3": Case(
        "Phi3ForCausalLM",
        CAUSAL
        | {"hidden_size": 48, "num_key_value_heads": 2, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5}
        | theta(5000.0, partial_rotary_factor=0.5),
        (theta(5000.0, partial_rotary_factor=1.0), {"rms_norm_eps": 1e-6}),
    ),
    "stablelm": Case(
        "StableLmForCausalLM",
        {**SIZES, **TOKENS, "hidden_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64, "layer_norm_eps": 1e-3}
        | {"use_qkv_bias": True}
        | theta(5000.0, partial_rotary_factor=0.5),
        (theta(5000.0, partial_rotary_factor=1.0), {"layer_norm_eps": 1e-6}),
    ),
    "mixtral": Case(
        "MixtralForCausalLM",
        GROUPED | {"intermediate_size": 28, "num_local_experts": 4, "num_experts_per_tok": 2} | theta(5000.0),
        ({"num_experts_per_tok": 1}, {"rms_norm_eps": 1e-6}),
    ),
    "qwen3_moe": Case(
        "Qwen3MoeForCausalLM",
        GROUPED
        | {"num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 6, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 20, "norm_topk_prob": False}
        | theta(5000.0),
        ({"norm_topk_prob": True}, {"num_experts_per_tok": 2}),
    ),
    "deepseek_v3": Case("DeepseekV3ForCausalLM", DEEPSEEK | {"q_lora_rank": 18}, DEEPSEEK_CHANGES),
    "deepseek_v3_plain_query": Case(
        "DeepseekV3ForCausalLM", DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 0}, DEEPSEEK_CHANGES
    ),
    "bert": Case("BertModel", BERT, BERT_CHANGES),
    "bert_mlm": Case("BertForMaskedLM", BERT, BERT_CHANGES),
}
