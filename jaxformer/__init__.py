"""jaxformer: every transformer is a config, every component a pure function of explicit parameters, every result exact or
refused.

The dimension key, one letter a dimension, in shapes, einsums and the suffixes of variables:

    B batch              T target (query) positions    S source (key, cache) positions
    D model width        L stacked layers              V vocabulary
    K key/value heads    G query heads per K head      H head width      (N = K·G query heads)
    F feed-forward width P rows of a learned position table
    E experts            J experts of a token          M pairs of a token and an expert of its
    C room of an expert  R latent of keys and values   Q latent of queries
"""

from jaxformer import flax, hf, presets, spec
from jaxformer.config import ModelConfig
from jaxformer.data import DataConfig, tokenizer
from jaxformer.decode.beam import Beams, beam_search
from jaxformer.decode.cache import Cache, init_cache
from jaxformer.decode.generate import Generated, generate
from jaxformer.decode.multitoken import MultiToken
from jaxformer.decode.programs import compilations
from jaxformer.decode.sampling import Sampling
from jaxformer.decode.speculative import DraftModel, PromptLookup
from jaxformer.decode.stream import Piece, stream
from jaxformer.cost import Explanation, explain
from jaxformer.nn import attention, block, mask, mlp, model, norm, position, rope, stack
from jaxformer.nn.model import forward, hidden, init
from jaxformer.nn.moe import Routed
from jaxformer.nn.named import capture, listen, named
from jaxformer.parts import Experts, Latent, RopeScaling
from jaxformer.run import Config, TrainConfig, load
from jaxformer.spec import Param, bias, gain, kernel
from jaxformer.training.loss import loss
from jaxformer.training.optim import OptimConfig

__all__ = [
    "Beams",
    "Cache",
    "Config",
    "DataConfig",
    "DraftModel",
    "Experts",
    "Explanation",
    "Generated",
    "Latent",
    "ModelConfig",
    "MultiToken",
    "OptimConfig",
    "Param",
    "Piece",
    "PromptLookup",
    "RopeScaling",
    "Routed",
    "Sampling",
    "TrainConfig",
    "attention",
    "beam_search",
    "bias",
    "block",
    "capture",
    "compilations",
    "explain",
    "flax",
    "forward",
    "gain",
    "generate",
    "hf",
    "hidden",
    "init",
    "init_cache",
    "kernel",
    "listen",
    "load",
    "loss",
    "mask",
    "mlp",
    "model",
    "named",
    "norm",
    "position",
    "presets",
    "rope",
    "spec",
    "stack",
    "stream",
    "tokenizer",
]
