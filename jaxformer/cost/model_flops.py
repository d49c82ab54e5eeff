"""Model FLOPs: what a model's formula asks for, whatever a program computes to get there."""

from dataclasses import dataclass

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.nn import model
from jaxformer.nn.cache_spec import can_decode, layer_spec


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one run, over all devices."""

    weights: float
    """2 per token and parameter that multiplies it in the forward pass, three times as many in training."""
    attention: float
    """Scores and mix, without the keys that a query does not see: half of all if it is causal."""

    @property
    def total(self) -> float:
        return self.weights + self.attention

    def __mul__(self, times: float) -> "ModelFlops":
        return ModelFlops(self.weights * times, self.attention * times)


def training(cfg: ModelConfig, rows: int, length: int, source_length: int = 0) -> ModelFlops:
    """An update: 6·N per token, and attention. N are the parameters that multiply a token: the head is one of them, looked-up
    tables are not, and of experts those that the token goes to."""
    weights = _multiplying(cfg, "decoder") * length + _multiplying(cfg, "encoder") * source_length
    pairs = sum(_per_pair(layer) * _visible(layer, length) for layer in cfg.layers)
    if cfg.mtp:  # a block and the head once more
        weights += length * cfg.vocab_size * cfg.d_model
        pairs += _per_pair(cfg.layers[-1]) * _visible(cfg.layers[-1], length)
    if cfg.encoder_layers:
        pairs += sum(_per_pair(layer) * source_length**2 for layer in cfg.encoder.layers)
        pairs += sum(_per_pair(layer) * length * source_length for layer in cfg.layers)
    return ModelFlops(2.0 * weights, float(pairs)) * (3 * rows)


def prefill(cfg: ModelConfig, rows: int, length: int) -> ModelFlops:
    """Reading prompts; the head reads the last position only."""
    head = cfg.vocab_size * cfg.d_model
    weights = 2.0 * ((_multiplying(cfg, "decoder") - head) * length + head)
    return ModelFlops(weights, sum(_per_pair(layer) * _visible(layer, length) for layer in cfg.layers)) * rows


def decoding(cfg: ModelConfig, rows: int, cached: int) -> ModelFlops:
    """One more token in every row, with ``cached`` tokens in the cache."""
    pairs = sum(_per_pair(layer) * _window(layer, cached) for layer in cfg.layers)
    return ModelFlops(2.0 * _multiplying(cfg, "decoder"), pairs) * rows


def _multiplying(cfg: ModelConfig, stack: str) -> int:
    """Parameters that multiply a token in the encoder, or everywhere else."""
    total = 0
    for path, param in specs.walk(model.spec(cfg)):
        looked_up = path in ("embedding.type", "decoder.position.table") or (
            path == "embedding.token" and not (cfg.tied_head and cfg.has_head)
        )
        if path.startswith("encoder.") == (stack == "encoder") and not looked_up:
            total += specs.active({path: param}, cfg)
    return total


def _per_pair(layer: ModelConfig) -> float:
    """FLOPs per pair of a query and a key, in all heads: scores and mix. A recurrence, which caches nothing per token, has no
    pairs; what it does to its state is left out."""
    if can_decode(layer) and not any("S" in param.dims for param in layer_spec(layer).values()):
        return 0.0
    if layer.attention == "latent":
        return 2.0 * layer.n_heads * (layer.head_dim + layer.latent.rope_dim + layer.latent.value_dim)
    return 4.0 * layer.n_heads * layer.head_dim


def _visible(layer: ModelConfig, length: int) -> float:
    """Pairs of a query and a key that it sees: T²/2 if causal, fewer with a window."""
    window = _window(layer, length)
    return length * window - window * window / 2 if layer.causal else float(length * length)


def _window(layer: ModelConfig, length: int) -> int:
    return min(layer.window, length) if isinstance(layer.window, int) else length
