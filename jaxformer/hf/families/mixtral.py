"""Mixtures of experts that are like LLaMA otherwise: Mixtral and Qwen3-MoE."""

from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.hf.config_reader import ConfigReader
from jaxformer.hf.families.llama import QWEN3, relative, tensors, window, window_of
from jaxformer.hf.family import Field, Fields, Rule
from jaxformer.hf.layout import Source, Table

# Fields of other training losses, and of ways to compute the same.
IGNORED = ("output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size", "experts_implementation")


def balance_loss(per_token: int) -> Rule:
    """The weight of the load-balancing loss. per_token: the family's default of experts per token.

    Their coefficient's loss adds up the shares of a token's choices, and takes all layers together.
    """

    def read(reader: ConfigReader) -> float:
        return reader.number("router_aux_loss_coef", 0.001) * reader.integer("num_experts_per_tok", per_token)

    return Rule(read, lambda cfg: {"router_aux_loss_coef": cfg.execution.balance_loss / cfg.experts.per_token})


def expert_tensors(block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Table:
    """The router, and experts each of whose tensors is a file's own."""
    return {
        "moe.router": Source(f"{block}.gate.weight", "ED"),
        "moe.gate": Source(f"{block}.experts.{{e}}.{gate}.weight", "FD"),
        "moe.up": Source(f"{block}.experts.{{e}}.{up}.weight", "FD"),
        "moe.down": Source(f"{block}.experts.{{e}}.{down}.weight", "DF"),
    }


MIXTRAL: Fields = {
    "d_ff": Rule(lambda reader: reader("intermediate_size")),  # that of experts is written
    "window": window(),
    "experts.n_experts": Field("num_local_experts", 8, aliases=("num_experts",)),
    "experts.per_token": Field("num_experts_per_tok", 2),
    "experts.d_ff": Field("intermediate_size"),
    "execution.balance_loss": balance_loss(2),
}


def _mixtral_tensors(cfg: ModelConfig) -> Table:
    return tensors(cfg, expert_tensors("block_sparse_moe", "w1", "w3", "w2"))


def _read_sparse_layers(reader: ConfigReader) -> tuple[int, ...] | None:
    step, dense = reader.integer("decoder_sparse_step", 1), set(reader("mlp_only_layers", None) or ())
    n_layers = reader.integer("num_hidden_layers")
    layers = tuple(layer for layer in range(n_layers) if layer not in dense and (layer + 1) % step == 0)
    return None if len(layers) == n_layers else layers


def _write_sparse_layers(cfg: ModelConfig) -> dict[str, Any]:
    sparse = range(cfg.n_layers) if cfg.experts.layers is None else cfg.experts.layers
    dense = [layer for layer in range(cfg.n_layers) if layer not in sparse]
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1}


def _read_window(reader: ConfigReader) -> int | None:
    width = reader("sliding_window", 4096)
    return width if reader.boolean("use_sliding_window", False) else None


def _write_window(cfg: ModelConfig) -> dict[str, Any]:
    width = window_of(cfg)
    return {"sliding_window": width, "use_sliding_window": width is not None}


QWEN3_MOE: Fields = QWEN3 | {
    "window": Rule(_read_window, _write_window),
    "experts.n_experts": Field("num_experts", 128, aliases=("num_local_experts",)),
    "experts.per_token": Field("num_experts_per_tok", 8),
    "experts.d_ff": Field("moe_intermediate_size", 768),
    "execution.balance_loss": balance_loss(8),
    "experts.normalize": Field("norm_topk_prob", False),
    "experts.layers": Rule(_read_sparse_layers, _write_sparse_layers),
}


def _qwen3_tensors(cfg: ModelConfig) -> Table:
    return tensors(cfg, expert_tensors("mlp"))


FAMILIES = {
    "mixtral": relative(
        "MixtralForCausalLM", MIXTRAL, only={"router_jitter_noise": 0.0}, ignored=IGNORED, tensors=_mixtral_tensors
    ),
    "qwen3_moe": relative(
        "Qwen3MoeForCausalLM",
        QWEN3_MOE,
        ignored=(*IGNORED, "max_window_layers"),  # its layers slide all or none
        tensors=_qwen3_tensors,
    ),
}
