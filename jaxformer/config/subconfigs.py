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
    """How many times longer than original_length the sequences become."""
    original_length: int | None = None
    """Sequence length in tokens that the model was first trained on. Required by dynamic, llama3 and yarn."""
    low_frequency: float = 1.0
    """llama3: frequencies that make fewer turns than this over original_length are divided by factor."""
    high_frequency: float = 4.0
    """llama3: frequencies that make more turns than this over original_length are kept."""
    beta_fast: float = 32.0
    """yarn: frequencies that make more turns than this over original_length are kept."""
    beta_slow: float = 1.0
    """yarn: frequencies that make fewer turns than this over original_length are divided by factor."""
    truncate: bool = True
    """yarn: round the bounds of the range of pairs that it blends outwards to whole numbers."""
    attention_factor: float | None = None
    """yarn: factor by which queries and keys are multiplied. Default: 0.1·ln(factor) + 1."""

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
            raise ValueError(f"rope_scaling.factor={self.factor} has no effect with rope_scaling.kind='none'; set the kind too")
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"rope_scaling.beta_slow={self.beta_slow} must be below beta_fast={self.beta_fast}")
        if self.kind not in ("none", "linear") and self.original_length is None:
            raise ValueError(f"rope_scaling of kind {self.kind!r} needs original_length")
        if self.low_frequency >= self.high_frequency:
            raise ValueError(
                f"rope_scaling.low_frequency={self.low_frequency} must be below high_frequency={self.high_frequency}"
            )


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
    """[E] Number of experts in a layer. 0: an ordinary feed-forward."""
    per_token: int = 2
    """[J] Number of experts that each token is routed to."""
    d_ff: int = 0
    """[F] Hidden width of an expert."""
    layers: tuple[int, ...] | None = None
    """Numbers of the layers that have experts, counted from 0; the others have an ordinary feed-forward. None: all layers."""
    shared: int = 0
    """Number of shared experts, which process every token in addition to the routed ones."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores."""
    normalize: bool = True
    """Divide the chosen experts' scores by their sum."""
    scale: float = 1.0
    """Factor by which the chosen experts' scores are multiplied."""
    groups: int = 1
    """Number of groups of experts. A token's experts come from the groups whose two best scores have the highest sum."""
    groups_per_token: int = 1
    """Number of groups that the experts of one token may come from."""
    selection_bias: bool = False
    """Add a bias per expert to the scores when choosing experts, but not when weighting them (Wang et al. 2024)."""

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
                raise ValueError(f"experts.{changed[0]} has no effect with experts.n_experts=0; set experts.n_experts too")
            return
        if not self.d_ff:
            raise ValueError("experts.d_ff must be given; it is the hidden width of an expert")
        if self.per_token > self.n_experts:
            raise ValueError(f"experts.per_token={self.per_token} is more than experts.n_experts={self.n_experts}")
        self._check_groups()

    def _check_groups(self):
        if self.n_experts % self.groups or (self.groups > 1 and self.n_experts // self.groups < 2):
            raise ValueError(
                f"experts.n_experts={self.n_experts} cannot be split into {self.groups} equal groups of two or more"
            )
        if self.groups_per_token > self.groups:
            raise ValueError(f"experts.groups_per_token={self.groups_per_token} is more than experts.groups={self.groups}")
        room = self.n_experts // self.groups * self.groups_per_token
        if self.per_token > room:
            raise ValueError(f"experts.per_token={self.per_token} is more than the {room} experts in a token's groups")

    def check(self, cfg: Any) -> None:
        """Raises ValueError where a ModelConfig cannot have them."""
        outside = [layer for layer in self.layers or () if not 0 <= layer < cfg.n_layers]
        if outside or self.layers == ():
            raise ValueError(f"experts.layers={self.layers} must name one or more of the layers 0 to {cfg.n_layers - 1}")
        if self.n_experts and type(cfg.mlp) is not tuple and cfg.mlp not in GATED:
            raise ValueError(f"experts are gated: mlp={cfg.mlp!r} must be one of {', '.join(GATED)}")
        if self.n_experts and (cfg.mlp_bias or cfg.encoder_layers):
            raise ValueError("experts support neither biases (mlp_bias=True) nor encoder–decoders (encoder_layers above 0)")

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
    """[R] Width of the latent that keys and values are computed from."""
    query_rank: int = 0
    """[Q] Width of the latent that queries are computed from. 0: queries are computed from the input."""
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
            raise ValueError(
                f"latent.rope_dim={self.rope_dim} is odd, but RoPE rotates pairs of dimensions; choose an even size"
            )

    def check(self, cfg: Any) -> None:
        """Raises ValueError where a ModelConfig cannot have it."""
        if type(cfg.attention) is tuple:  # checked for each layer
            return
        if cfg.attention != "latent":
            if self != Latent():
                raise ValueError(f"latent has no effect with attention={cfg.attention!r}; set attention='latent' too")
            return
        if not self.rank or cfg.position != "rope" or cfg.n_kv_heads != cfg.n_heads or cfg.encoder_layers:
            raise ValueError(
                "attention='latent' needs latent.rank above 0, position='rope', n_kv_heads=n_heads, and no encoder"
            )
        if cfg.qkv_bias or cfg.out_bias or cfg.qk_norm != "none" or cfg.rope_fraction != 1 or cfg.attention_softcap:
            raise ValueError("attention='latent' does not support biases, qk_norm, rope_fraction or attention_softcap")
