"""What a model is: one frozen, hashable record, a static argument of ``jax.jit``."""

import dataclasses
import functools
import math
import re
from dataclasses import dataclass
from typing import Literal

from jaxformer.component import name_of, resolve
from jaxformer.parts import Experts, Latent, RopeScaling
from jaxformer.record import Derived, Strict, dtype_name, within

COMPONENTS = ("attention", "mlp", "norm", "position")


@dataclass(frozen=True)
class ModelConfig(Strict):
    """A transformer. Letters in brackets are the dimension key's (see the package docstring).

    ``attention``, ``mlp``, ``norm`` and ``position`` also take a component itself (see ``jaxformer.component``), ``dtype`` and
    ``param_dtype`` anything that is a dtype; each is kept as the string that names it.

    Raises ValueError, naming the field, for values that fit no model.
    """

    UNCHECKED = COMPONENTS  # strings for the command line; components themselves elsewhere

    vocab_size: int
    """[V] rows of the embedding table."""
    d_model: int
    """[D] width of the residual stream."""
    n_layers: int
    """[L] blocks of the decoder (or of the only stack)."""
    n_heads: int
    """[N = K·G] query heads."""
    n_kv_heads: int = Derived(0)
    """[K] key/value heads: n_heads (the default) is MHA, 1 is MQA, anything between GQA."""
    head_dim: int = Derived(0)
    """[H] width of a head; d_model / n_heads unless given."""
    d_ff: int = Derived(0)
    """[F] hidden width of the feed-forward; 4·d_model unless given."""
    max_length: int = 2048
    """[P] rows of a learned position table, and the length that decoding and training plan for."""
    encoder_layers: int = 0
    """Blocks of the encoder; above 0 the model is an encoder–decoder and its decoder has cross-attention."""
    encoder_heads: int | None = None
    """[N] heads of the encoder; n_heads unless given."""
    encoder_d_ff: int | None = None
    """[F] of the encoder; d_ff unless given."""
    start_token: int | None = None
    """Id that the target of an encoder–decoder starts with."""
    causal: bool = True
    """Whether a position sees only itself and what stands before it."""

    attention: str = "grouped"
    """Attention component: grouped (MHA, GQA and MQA in one), latent, or 'package.module:name'."""
    latent: Latent = Latent()
    """Widths of latent attention (attention='latent')."""
    mlp: str = "gelu"
    """Feed-forward component: relu, silu, gelu, gelu_tanh, swiglu, geglu, geglu_tanh, or 'package.module:name'."""
    experts: Experts = Experts()
    """Experts in place of the feed-forward, in all layers or some; their activation is the mlp's, which must be gated."""
    norm: str = "layer"
    """Normalisation component: layer, rms, rms_plus (its gain is 1 + the parameter), or 'package.module:name'."""
    position: str = "rope"
    """Position component: none, sinusoidal, sinusoidal_half, learned, rope, relative, or 'package.module:name'."""
    residual: Literal["pre", "post", "parallel", "sandwich", "branch"] = "pre"
    """Where norms stand: pre, x + f(norm(x)); post, norm(x + f(x)), as in 2017, without the final norm that all others have;
    parallel, x + attention(norm(x)) + mlp(norm'(x)); sandwich, x + norm'(f(norm(x))); branch, x + norm(f(x))."""

    norm_eps: float = 1e-5
    """Epsilon inside the root of a norm."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_layout: Literal["interleaved", "half"] = "interleaved"
    """Pairs that RoPE rotates: interleaved, (x[2i], x[2i+1]); half, (x[i], x[i+H/2]), as published checkpoints store them."""
    rope_fraction: float = 1.0
    """Share of every head's width that is rotated, from its start."""
    rope_local_theta: float | None = None
    """Base of the layers that have a window, whose frequencies are not scaled; rope_theta and rope_scaling unless given."""
    rope_scaling: RopeScaling = RopeScaling()
    """How the rotary frequencies are stretched (None: not at all)."""
    position_offset: int = 0
    """Row of a learned table that position 0 reads; the table has as many more."""
    relative_buckets: int = 32
    """[P] buckets of relative positions (position='relative')."""
    relative_distance: int = 128
    """Distance from which on all share the last bucket."""
    window: int | tuple[int | None, ...] | None = None
    """Keys that a query sees, itself included; one number for all layers, or one (None: all keys) a layer."""
    attention_scale: float | None = None
    """Multiplies the scores; 1/sqrt(H) unless given."""
    attention_softcap: float | None = None
    """c·tanh(scores / c) before the mask."""
    logit_softcap: float | None = None
    """c·tanh(logits / c)."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """Normalise queries and keys before RoPE: every head by itself, or all heads of a token together. True is "head"."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    out_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    """Biases in the feed-forward."""
    tied_head: bool = False
    """The head is the transposed embedding: one array, both uses."""
    token_types: int = 0
    """Kinds of tokens that are told apart by an embedding of their own (token_types= of the forward)."""
    has_head: bool = True
    """Whether the model has logits; without, only ``jf.hidden``."""
    head_transform: bool = False
    """A linear map with bias, the activation of the mlp and a norm before the head."""
    pooler: bool = False
    """A linear map and tanh of the first token (``jf.model.pooled``)."""
    head_bias: bool = False
    """Bias on the logits."""
    mtp: bool = False
    """A block more, which predicts the token after the next (``nn.mtp``)."""
    scale_head: bool = False
    """Multiply what the head reads by 1/sqrt(D)."""
    embedding_norm: bool = False
    """Normalise the embeddings, with their positions."""
    scale_embedding: bool = False
    """Multiply embeddings by sqrt(D); they are then initialised with std 1/sqrt(D)."""

    attention_dropout: float = 0.0
    """Dropout rate of attention weights (active only when a key is given)."""
    residual_dropout: float = 0.0
    """Dropout rate of each sublayer's output."""
    embedding_dropout: float = 0.0
    """Dropout rate after embedding and position."""

    init: Literal["fan_in", "xavier", "normal"] = "fan_in"
    """Initial weights: fan_in, std 1/sqrt(inputs); xavier, uniform with variance 2/(inputs + outputs); normal, std init_std."""
    init_std: float = 0.02
    """Standard deviation of the embedding (unless scale_embedding) and, with init='normal', of every weight."""
    scale_residual_init: bool = False
    """Divide the initial weights that write into the residual stream by sqrt(2·layers), as GPT-2 does."""

    dtype: str = "float32"
    """Compute dtype. Norm statistics, softmax, angles and the loss stay float32."""
    param_dtype: str = "float32"
    """Dtype that parameters are stored in."""
    scan: bool = False
    """Run the layers as one lax.scan (compiles once for all layers: right for deep models on accelerators) or unrolled
    (faster on CPU). The parameters are the same."""
    attention_kernel: Literal["auto", "xla", "splash", "cudnn"] = "auto"
    """What computes attention: plain XLA; splash, a TPU's kernel; cudnn, on GPUs; auto, the device's own where it can."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes: none; dots, all but matrix products and what attention gives; full, all in a block."""
    save: tuple[str, ...] = ()
    """Named activations that it does not recompute though remat says so: attention.query, mlp.up, block.out and their like."""

    def __post_init__(self):
        set_ = functools.partial(object.__setattr__, self)
        for kind in COMPONENTS:
            resolve(kind, getattr(self, kind))
            set_(kind, name_of(kind, getattr(self, kind)))
        for name in ("dtype", "param_dtype"):
            set_(name, dtype_name(name, getattr(self, name)))
        for name in ("n_kv_heads", "head_dim", "d_ff"):
            set_(name, Derived(0) if getattr(self, name) is None else getattr(self, name))
        if isinstance(self.qk_norm, bool):
            set_("qk_norm", "head" if self.qk_norm else "none")
        if self.rope_scaling is None:
            set_("rope_scaling", RopeScaling())
        for name in ("window", "save"):
            if isinstance(getattr(self, name), list):
                set_(name, tuple(getattr(self, name)))
        super().__post_init__()
        within(self, 1, math.inf, "vocab_size", "d_model", "n_layers", "n_heads", "max_length")
        self._derive(set_)
        self._check()

    def _derive(self, set_):
        if isinstance(self.n_kv_heads, Derived):
            set_("n_kv_heads", Derived(self.n_heads))
        if isinstance(self.head_dim, Derived):
            if self.d_model % self.n_heads:
                why = "give head_dim or change one"
                raise ValueError(f"d_model={self.d_model} does not divide by n_heads={self.n_heads}; {why}")
            set_("head_dim", Derived(self.d_model // self.n_heads))
        if isinstance(self.d_ff, Derived):
            set_("d_ff", Derived(4 * self.d_model))

    def _check(self):
        within(self, 1, math.inf, "n_kv_heads", "head_dim", "d_ff")
        within(self, 0, math.inf, "encoder_layers", "token_types", "position_offset")
        within(self, 0, 1, "attention_dropout", "residual_dropout", "embedding_dropout")
        within(self, 1, math.inf, "encoder_heads", "encoder_d_ff")
        positive = ["norm_eps", "rope_theta", "rope_local_theta", "init_std", "attention_scale", "attention_softcap"]
        within(self, 0, math.inf, *positive, "logit_softcap", open_low=True)
        within(self, 2, math.inf, "relative_buckets", "relative_distance")
        within(self, 0, self.vocab_size, "start_token")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads={self.n_heads} does not divide by n_kv_heads={self.n_kv_heads}")
        if isinstance(self.window, tuple) and len(self.window) != self.n_layers:
            raise ValueError(f"window has {len(self.window)} entries for n_layers={self.n_layers}")
        for width in self.window if isinstance(self.window, tuple) else (self.window,):
            if width is not None and width < 1:
                raise ValueError(f"window={width} must be at least 1: a query sees itself")
        if not 0 < self.rope_fraction <= 1:
            raise ValueError(f"rope_fraction={self.rope_fraction} is outside (0, 1]")
        if self.position == "rope" and (self.rotary_dim % 2 or not self.rotary_dim):
            part = f"rope_fraction={self.rope_fraction} of " if self.rope_fraction < 1 else ""
            raise ValueError(f"{part}head_dim={self.head_dim} is odd: RoPE rotates pairs")
        if self.head_transform and self.mlp not in ("relu", "silu", "gelu", "gelu_tanh"):
            raise ValueError(f"head_transform has the mlp's activation: relu, silu, gelu or gelu_tanh, not {self.mlp!r}")
        if self.position in ("sinusoidal", "sinusoidal_half") and self.d_model % 2:
            raise ValueError(f"d_model={self.d_model} is odd: sinusoids come in pairs of sine and cosine")
        if self.position == "rope" and self.rope_scaling.kind == "dynamic" and self.rotary_dim < 4:
            raise ValueError(f"head_dim={self.head_dim}: rope_scaling of kind 'dynamic' needs more than one pair")
        if self.position != "rope" and self.rope_scaling.kind != "none":
            raise ValueError(f"rope_scaling of kind {self.rope_scaling.kind!r} has no effect with position={self.position!r}")
        if self.position == "relative":
            self._check_relative()
        if self.save and self.remat == "none":
            raise ValueError(f"save={self.save} has no effect with remat='none', which recomputes nothing")
        self.experts.check(self)
        self.latent.check(self)
        self._check_encoder()

    def _check_relative(self):
        both_ways = bool(self.encoder_layers) or not self.causal
        exact = self.relative_buckets // (4 if both_ways else 2)
        if exact < 1:
            raise ValueError(f"relative_buckets={self.relative_buckets} must be at least {4 if both_ways else 2}")
        if self.relative_distance <= self.relative_buckets // 2:
            half = f"half of relative_buckets={self.relative_buckets}"
            raise ValueError(f"relative_distance={self.relative_distance} must be above {half}, one for each distance")

    def _check_encoder(self):
        fits = self.causal and self.has_head and not self.token_types and self.position in ("rope", "none")
        if self.mtp and (self.encoder_layers or not fits):
            raise ValueError("mtp needs a causal decoder with a head, and position='rope' or 'none'")
        if self.encoder_layers and self.residual == "parallel":
            raise ValueError("residual='parallel' is not defined for a decoder with cross-attention (encoder_layers above 0)")
        if self.encoder_layers:
            try:
                _ = self.encoder
            except ValueError as error:  # its n_heads is our encoder_heads
                raise ValueError("of the encoder: " + re.sub(r"\bn_heads=", "encoder_heads=", str(error))) from error
        elif self.encoder_heads is not None or self.encoder_d_ff is not None:
            raise ValueError("encoder_heads and encoder_d_ff have no effect without an encoder (encoder_layers=0)")

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
            "E": self.experts.number,
            "R": self.latent.rank,
            "Q": self.latent.query_rank,
        }
        return {letter: size for letter, size in sizes.items() if size}

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
        """One config a layer: the same but for what is chosen by layer."""
        windows = self.window if isinstance(self.window, tuple) else (self.window,) * self.n_layers

        def own(window: int | None, experts: Experts) -> ModelConfig:
            one = dataclasses.replace(self, window=window, experts=experts)
            if window is None or self.rope_local_theta is None:
                return one
            return dataclasses.replace(one, rope_theta=self.rope_local_theta, rope_scaling=RopeScaling())

        kinds = [(window, self.experts.at(number)) for number, window in enumerate(windows)]
        by_kind = {kind: own(*kind) for kind in set(kinds)}
        return tuple(by_kind[kind] for kind in kinds)
