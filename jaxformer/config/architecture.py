"""What a model is: one frozen, hashable record, a static argument of ``jax.jit``."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import tyro

from jaxformer.config import checks
from jaxformer.config import execution as executions
from jaxformer.config.checks import BY_LAYER, MOST_LAYERS, letters
from jaxformer.config.components import BUILT_IN, normalized
from jaxformer.config.execution import Execution
from jaxformer.config.strict import Derived, Strict, dtype_name, within
from jaxformer.config.subconfigs import Experts, Latent, RopeScaling

COMPONENTS = tuple(BUILT_IN)
DEFAULT = Execution()
Residual = Literal["pre", "post", "parallel", "sandwich", "branch"]


def _head_dim(cfg: "ModelConfig") -> int:
    if cfg.d_model % cfg.n_heads:
        raise ValueError(f"d_model={cfg.d_model} is not divisible by n_heads={cfg.n_heads}; change one, or give head_dim")
    return cfg.d_model // cfg.n_heads


DERIVED: dict[str, Callable[[Any], int]] = {
    "n_kv_heads": lambda cfg: cfg.n_heads,
    "head_dim": _head_dim,
    "d_ff": lambda cfg: 4 * cfg.d_model,
    "encoder_layers": lambda cfg: 0,
}
"""Fields that are worked out unless given, and from what."""


@jax.tree_util.register_static  # jitted functions take a config as an argument without static_argnums
@dataclass(frozen=True)
class ModelConfig(Strict):
    """A transformer. Letters in brackets are the dimension key's (see the package docstring).

    The fields of this record, but for ``execution``, are the architecture: what function the parameters define. A checkpoint
    fits every model of one architecture, whatever its ``execution``. The constructor and ``dataclasses.replace`` also take the
    fields of ``Execution`` by keyword: ``dataclasses.replace(cfg, dtype="bfloat16")``.

    ``attention``, ``mlp``, ``norm`` and ``position`` take a name, an import path or a component itself (see
    ``jaxformer.config.components``); ``attention``, ``mlp``, ``position``, ``residual`` and ``window`` also a tuple with one
    value per layer.

    Raises ValueError, naming the field, for values that fit no model.
    """

    UNCHECKED = COMPONENTS
    NAMES = BUILT_IN
    FORMER = {"save": "remat_save"}

    vocab_size: int
    """[V] Rows of the embedding table, one per token id."""
    d_model: int
    """[D] Width of the residual stream."""
    n_layers: int
    """[L] Number of blocks in the decoder, or in the only stack."""
    n_heads: int
    """[N = K·G] Number of query heads."""
    n_kv_heads: int = Derived(0)
    """[K] Number of key/value heads: n_heads (the default) is MHA, 1 is MQA, anything in between is GQA."""
    head_dim: int = Derived(0)
    """[H] Width of a head. Default: d_model / n_heads."""
    d_ff: int = Derived(0)
    """[F] Hidden width of the feed-forward. Default: 4·d_model."""
    max_length: int = 2048
    """[P] Rows of a learned position table, and the sequence length in tokens that decoding and training plan for."""
    encoder_layers: int = 0
    """Number of blocks in the encoder. Above 0, the model is an encoder–decoder and its decoder has cross-attention."""
    encoder_heads: int | None = None
    """[N] Number of query heads in the encoder. Default: n_heads."""
    encoder_d_ff: int | None = None
    """[F] Hidden width of the encoder's feed-forward. Default: d_ff."""
    start_token: int | None = None
    """Id of the token that every target of an encoder–decoder starts with."""
    causal: bool = True
    """Whether a position attends only to itself and to earlier positions."""

    attention: Any = "grouped"
    """Attention component: grouped (MHA, GQA and MQA in one), latent, or 'package.module:name'."""
    latent: Latent = Latent()
    """Widths of latent attention (attention='latent')."""
    mlp: Any = "gelu"
    """Feed-forward component: relu, silu, gelu, gelu_tanh, swiglu, geglu, geglu_tanh, or 'package.module:name'."""
    experts: Experts = Experts()
    """Experts in place of the feed-forward, in all layers or some; their activation is the mlp's, which must be gated."""
    norm: Any = "layer"
    """Normalisation component: layer, rms, rms_plus (its gain is 1 + the parameter), or 'package.module:name'."""
    position: Any = "rope"
    """Position component: none, sinusoidal, sinusoidal_half, learned, rope, relative, or 'package.module:name'."""
    residual: Residual | tuple[Residual, ...] = "pre"
    """Where norms stand: pre, x + f(norm(x)); post, norm(x + f(x)), as in 2017, without the final norm that all others have;
    parallel, x + attention(norm(x)) + mlp(norm'(x)); sandwich, x + norm'(f(norm(x))); branch, x + norm(f(x))."""

    norm_eps: float = 1e-5
    """Epsilon that a norm adds to the variance before the square root."""
    rope_theta: float = 10_000.0
    """Base of the rotary (RoPE) frequencies."""
    rope_layout: Literal["interleaved", "half"] = "interleaved"
    """Which pairs RoPE rotates: interleaved, (x[2i], x[2i+1]); half, (x[i], x[i+H/2]), as published checkpoints store them."""
    rope_fraction: float = 1.0
    """Share of every head's width that is rotated, from its start."""
    rope_local_theta: float | None = None
    """RoPE base of the layers that have a window, without scaling. Default: they use rope_theta and rope_scaling too."""
    rope_scaling: RopeScaling = RopeScaling()
    """How the rotary frequencies are stretched for longer sequences (None: not at all)."""
    position_offset: int = 0
    """Row of a learned position table that position 0 reads; the table has this many extra rows."""
    relative_buckets: int = 32
    """[P] Number of buckets of relative positions (position='relative')."""
    relative_distance: int = 128
    """Distance in tokens from which all pairs share the last bucket (position='relative')."""
    window: int | tuple[int | None, ...] | None = None
    """Number of keys that a query attends to, its own included: one number, or one per layer. None: all keys."""
    attention_scale: float | None = None
    """Factor by which the attention scores are multiplied. Default: 1/sqrt(H)."""
    attention_softcap: float | None = None
    """Bounds the attention scores before the mask: c·tanh(scores / c). None: unbounded."""
    logit_softcap: float | None = None
    """Bounds the logits: c·tanh(logits / c). None: unbounded."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """Normalise queries and keys before RoPE: head, each head by itself; all, all heads of a token together. True is "head"."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have biases."""
    out_bias: bool = False
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool = False
    """Whether the feed-forward has biases."""
    tied_head: bool = False
    """Use the transposed token embedding as the head, so that the two share one array."""
    token_types: int = 0
    """Number of token types with an embedding each, as in BERT (the argument token_types of jf.forward). 0: none."""
    has_head: bool = True
    """Whether the model has a head, which gives logits. Without one, use ``jf.hidden``."""
    head_transform: bool = False
    """Put a linear map with bias, the activation of mlp and a norm before the head, as in BERT."""
    pooler: bool = False
    """Add a pooler: a linear map and tanh of the first token's hidden state (``jf.model.pooled``)."""
    head_bias: bool = False
    """Whether the logits have a bias."""
    mtp: bool = False
    """Add a block that predicts the token after the next one, as DeepSeek-V3 does (``nn.mtp``)."""
    scale_head: bool = False
    """Multiply the hidden states by 1/sqrt(D) before the head."""
    embedding_norm: bool = False
    """Normalise the embeddings after positions have been added."""
    scale_embedding: bool = False
    """Multiply embeddings by sqrt(D); they are then initialised with std 1/sqrt(D)."""

    init: Literal["fan_in", "xavier", "normal"] = "fan_in"
    """Initial weights: fan_in, std 1/sqrt(inputs); xavier, uniform with variance 2/(inputs + outputs); normal, std init_std."""
    init_std: float = 0.02
    """Standard deviation of the embedding (unless scale_embedding) and, with init='normal', of every weight."""
    scale_residual_init: bool = False
    """Divide the initial weights that write into the residual stream by sqrt(2·layers), as GPT-2 does."""

    param_dtype: str = "float32"
    """Dtype that parameters are stored in."""
    execution: Annotated[Execution, tyro.conf.arg(name="")] = DEFAULT
    """How the model is computed and regularised in training."""

    @classmethod
    def keywords(cls) -> list[str]:
        """Names that the constructor takes: fields, and those of ``Execution``."""
        return [*super().keywords(), *executions.NAMES]

    def __post_init__(self):
        set_ = functools.partial(object.__setattr__, self)
        for kind in COMPONENTS:
            value = getattr(self, kind)
            by_layer = isinstance(value, list) or type(value) is tuple  # a NamedTuple is one component
            if by_layer and kind not in BY_LAYER:
                raise ValueError(f"{kind}={value!r} cannot be chosen by layer; only {', '.join(BY_LAYER)} can")
            set_(kind, tuple(normalized(kind, v) for v in value) if by_layer else normalized(kind, value))
        set_("param_dtype", dtype_name("param_dtype", self.param_dtype))
        for name in ("n_kv_heads", "head_dim", "d_ff"):
            set_(name, Derived(0) if getattr(self, name) is None else getattr(self, name))
        if isinstance(self.qk_norm, bool):
            set_("qk_norm", "head" if self.qk_norm else "none")
        if self.rope_scaling is None:
            set_("rope_scaling", RopeScaling())
        for name in ("window", "residual"):
            if isinstance(getattr(self, name), list):
                set_(name, tuple(getattr(self, name)))
        super().__post_init__()
        within(self, 1, 2**31, "vocab_size", "d_model", "n_heads", "max_length")
        within(self, 1, MOST_LAYERS + 1, "n_layers")
        within(self, 0, MOST_LAYERS + 1, "encoder_layers")
        self._derive(set_)
        checks.check(self)

    def _derive(self, set_):
        for name, usual in DERIVED.items():
            if isinstance(value := getattr(self, name), Derived):
                set_(name, Derived((value.rule or usual)(self), value.rule))

    def with_execution(self, **changes: Any) -> "ModelConfig":
        """The same architecture, computed with ``changes`` of ``Execution``'s fields."""
        return dataclasses.replace(self, execution=dataclasses.replace(self.execution, **changes))

    @property
    def rotary_dim(self) -> int:
        """How much of a head's width is rotated."""
        if self.attention == "latent":
            return self.latent.rope_dim
        return int(self.head_dim * self.rope_fraction)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Size of every letter of the dimension key that the config fixes."""
        sizes = {
            "D": self.d_model,
            "L": self.n_layers,
            "K": self.n_kv_heads,
            "G": self.n_heads // self.n_kv_heads,
            "H": self.head_dim,
            "F": self.d_ff,
            "V": self.vocab_size,
            "P": self.max_length,
            "E": self.experts.n_experts,
            "R": self.latent.rank,
            "Q": self.latent.query_rank,
            "O": self.d_model,
        }
        return {letter: size for letter, size in sizes.items() if size} | self.component_sizes

    @functools.cached_property
    def component_sizes(self) -> dict[str, int]:
        """Sizes of the letters that components declare for themselves (of a layer's config: that layer's components)."""
        sizes: dict[str, int] = {}
        for kind in COMPONENTS:
            sizes |= letters(getattr(self, kind), self)
        return sizes

    @functools.cached_property
    def encoder(self) -> "ModelConfig":
        """The config of an encoder–decoder's encoder: its own depth, nothing masked for causality."""
        return dataclasses.replace(
            self,
            n_layers=self.encoder_layers,
            n_heads=self.encoder_heads or self.n_heads,
            d_ff=self.encoder_d_ff or self.d_ff,
            encoder_layers=0,
            encoder_heads=None,
            encoder_d_ff=None,
            causal=False,
            window=None,
        )

    @functools.cached_property
    def layers(self) -> tuple["ModelConfig", ...]:
        """One config per layer: the same but for what is chosen by layer."""

        def by_layer(name: str) -> tuple:
            value = getattr(self, name)
            return value if type(value) is tuple else (value,) * self.n_layers

        rows = list(zip(*map(by_layer, BY_LAYER), self.experts.by_layer(self.n_layers), strict=True))
        configs: dict[tuple, ModelConfig] = {}
        for number, row in enumerate(rows):
            if row not in configs:
                configs[row] = self._layer(number, **dict(zip((*BY_LAYER, "experts"), row, strict=True)))
        return tuple(configs[row] for row in rows)

    def _layer(self, number: int, **kind: Any) -> "ModelConfig":
        """The config of layer ``number``, without what another kind of layer has."""
        if kind["attention"] != "latent":
            kind["latent"] = Latent()
        if kind["position"] != "rope":
            kind["rope_scaling"] = RopeScaling()
        elif kind["window"] is not None and self.rope_local_theta is not None:
            kind |= {"rope_theta": self.rope_local_theta, "rope_scaling": RopeScaling()}
        try:
            return dataclasses.replace(self, **kind)
        except ValueError as error:
            raise ValueError(f"layer {number}: {error}") from error

    @functools.cached_property
    def positions(self) -> frozenset:
        """The position components of the layers."""
        return frozenset(self.position if type(self.position) is tuple else (self.position,))


_fields_init = ModelConfig.__init__


@functools.wraps(_fields_init)
def _init(self: ModelConfig, *args: Any, execution: Execution = DEFAULT, **fields: Any) -> None:
    _fields_init(self, *args, **executions.routed(execution, fields))


ModelConfig.__init__ = _init  # type: ignore[method-assign]
