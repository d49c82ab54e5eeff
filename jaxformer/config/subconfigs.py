"""Records inside a ModelConfig: how rotary positions are stretched, a feed-forward of experts, latent attention."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from jaxformer.config.strict import Strict, within

GATED = ("swiglu", "geglu", "geglu_tanh")
"""Feed-forwards that may be experts."""


@dataclass(frozen=True)
class RopeScaling(Strict):
    """How rotary frequencies change for sequences longer than a model was first trained on (``nn.rope.frequencies``)."""

    kind: Literal["none", "linear", "dynamic", "llama3", "yarn"] = "none"
    """linear: positions divided (Chen et al. 2023); dynamic: the base grows with the length; llama3: low frequencies are
    divided; yarn: low frequencies are divided and scores sharpened (Peng et al. 2023); none: nothing changes."""
    factor: float = 1.0
    """How many times longer."""
    original_length: int | None = None
    """Positions of the first training; dynamic, llama3 and yarn need it."""
    low_frequency: float = 1.0
    """llama3: frequencies with fewer turns than this in the original length are divided by the factor."""
    high_frequency: float = 4.0
    """llama3: frequencies with more turns are kept."""
    beta_fast: float = 32.0
    """yarn: pairs with more turns in the original length are kept."""
    beta_slow: float = 1.0
    """yarn: pairs with fewer turns are divided by the factor."""
    truncate: bool = True
    """yarn: round the pairs between which it blends outwards to whole numbers."""
    attention_factor: float | None = None
    """yarn: multiplies queries and keys; 0.1·ln(factor) + 1 unless given."""

    def __post_init__(self):
        super().__post_init__()
        positive = (
            "factor",
            "original_length",
            "low_frequency",
            "high_frequency",
            "beta_fast",
            "beta_slow",
            "attention_factor",
        )
        within(self, 0, math.inf, *positive, open_low=True, prefix="rope_scaling.")
        if self.kind == "none" and self.factor != 1.0:
            raise ValueError(f"rope_scaling.factor={self.factor} has no effect with kind 'none'")
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow} must be below beta_fast={self.beta_fast}")
        if self.kind not in ("none", "linear") and self.original_length is None:
            raise ValueError(f"rope_scaling of kind {self.kind!r} needs original_length")
        if self.low_frequency >= self.high_frequency:
            raise ValueError(f"low_frequency={self.low_frequency} must be below high_frequency={self.high_frequency}")


@dataclass(frozen=True)
class Experts(Strict):
    """A feed-forward of gated experts, a few of which each token is routed to (``nn.experts``). n_experts=0: none."""

    FORMER = {
        "number": "n_experts",
        "dispatch": "ModelConfig(expert_dispatch=...)",
        "capacity": "ModelConfig(expert_capacity=...)",
        "balance_loss": "ModelConfig(balance_loss=...)",
        "z_loss": "ModelConfig(router_z_loss=...)",
        "balance_rate": "ModelConfig(balance_rate=...)",
    }

    n_experts: int = 0
    """[E] experts of a layer; 0: an ordinary feed-forward."""
    per_token: int = 2
    """[J] experts that each token is routed to."""
    d_ff: int = 0
    """[F] hidden width of an expert."""
    layers: tuple[int, ...] | None = None
    """Numbers of the layers that have experts; the others have an ordinary feed-forward. None: all have."""
    shared: int = 0
    """Shared experts, which every token is routed to as well."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores."""
    normalize: bool = True
    """Divide the chosen experts' scores by their sum."""
    scale: float = 1.0
    """Multiplies the chosen experts' scores."""
    groups: int = 1
    """Groups of experts; a token's experts come from the groups_per_token groups whose two best scores have the highest sum."""
    groups_per_token: int = 1
    """Groups that the experts of one token may come from."""
    selection_bias: bool = False
    """A bias per expert, added to the scores for choosing experts but not for weighing them (Wang et al. 2024)."""

    def __post_init__(self):
        if isinstance(self.layers, list | tuple) and all(isinstance(layer, int) for layer in self.layers):
            object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))
        super().__post_init__()
        within(self, 0, 2**31, "n_experts", "d_ff", "shared", prefix="experts.")
        within(self, 1, 2**31, "per_token", "groups", "groups_per_token", prefix="experts.")
        within(self, 0, math.inf, "scale", open_low=True, prefix="experts.")
        if not self.n_experts:
            changed = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
            if changed:
                raise ValueError(f"experts.{changed[0]} has no effect with experts.n_experts=0")
            return
        if not self.d_ff:
            raise ValueError("experts.d_ff must be given: the hidden width of an expert")
        if self.per_token > self.n_experts:
            raise ValueError(f"experts.per_token={self.per_token} is more than experts.n_experts={self.n_experts}")
        self._check_groups()

    def _check_groups(self):
        if self.n_experts % self.groups or (self.groups > 1 and self.n_experts // self.groups < 2):
            raise ValueError(f"experts.n_experts={self.n_experts} does not make {self.groups} groups of two and more")
        if self.groups_per_token > self.groups:
            raise ValueError(f"experts.groups_per_token={self.groups_per_token} is more than experts.groups={self.groups}")
        room = self.n_experts // self.groups * self.groups_per_token
        if self.per_token > room:
            raise ValueError(f"experts.per_token={self.per_token} is more than the {room} experts of a token's groups")

    def check(self, cfg: Any) -> None:
        """Raises ValueError where a ModelConfig cannot have them."""
        outside = [layer for layer in self.layers or () if not 0 <= layer < cfg.n_layers]
        if outside or self.layers == ():
            raise ValueError(f"experts.layers={self.layers} must name some of the layers 0 to {cfg.n_layers - 1}")
        if self.n_experts and type(cfg.mlp) is not tuple and cfg.mlp not in GATED:
            raise ValueError(f"experts are gated: mlp={cfg.mlp!r} must be one of {', '.join(GATED)}")
        if self.n_experts and (cfg.mlp_bias or cfg.encoder_layers):
            raise ValueError("experts have no biases (mlp_bias), and are not for encoder–decoders")

    def by_layer(self, n_layers: int) -> tuple["Experts", ...]:
        """Those of each layer."""
        chosen, none = dataclasses.replace(self, layers=None), Experts()
        if self.layers is None:
            return (chosen,) * n_layers
        layers = frozenset(self.layers)
        return tuple(chosen if layer in layers else none for layer in range(n_layers))


@dataclass(frozen=True)
class Latent(Strict):
    """Latent attention (DeepSeek-AI 2024, section 2.1), for ``attention="latent"``: keys and values are made of a latent,
    which is all that a cache keeps, besides a rotary key that all heads share. A head's width H is that of its part without
    positions."""

    rank: int = 0
    """[R] width of the latent."""
    query_rank: int = 0
    """[Q] width of the queries' latent; 0: queries are made of the input."""
    rope_dim: int = 64
    """Width of the rotary part of queries and keys."""
    value_dim: int = 128
    """Width of a value head."""
    norm_eps: float = 1e-6
    """Epsilon of the latents' norms."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 0, 2**31, "rank", "query_rank", prefix="latent.")
        within(self, 1, 2**31, "rope_dim", "value_dim", prefix="latent.")
        within(self, 0, math.inf, "norm_eps", open_low=True, prefix="latent.")
        if self.rope_dim % 2:
            raise ValueError(f"latent.rope_dim={self.rope_dim} is odd: RoPE rotates pairs of dimensions; choose an even size")

    def check(self, cfg: Any) -> None:
        """Raises ValueError where a ModelConfig cannot have it."""
        if type(cfg.attention) is tuple:  # checked for each layer
            return
        if cfg.attention != "latent":
            if self != Latent():
                raise ValueError(f"latent has no effect with attention={cfg.attention!r}")
            return
        if not self.rank or cfg.position != "rope" or cfg.n_kv_heads != cfg.n_heads or cfg.encoder_layers:
            raise ValueError("attention='latent' needs latent.rank, position='rope', as many n_kv_heads as n_heads, no encoder")
        if cfg.qkv_bias or cfg.out_bias or cfg.qk_norm != "none" or cfg.rope_fraction != 1 or cfg.attention_softcap:
            raise ValueError("attention='latent' has no biases, qk_norm, rope_fraction or attention_softcap")
