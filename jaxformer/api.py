"""What users call: every name of ``jaxformer``, which reads this file when the first of them is asked for."""

import importlib
from typing import TYPE_CHECKING, Any

from jaxformer import data, decode, hf, training
from jaxformer.config import Execution, Experts, Latent, ModelConfig, RopeScaling, presets, spec
from jaxformer.config.components import Component
from jaxformer.config.documented import document
from jaxformer.config.spec import Param, bias, gain, weight
from jaxformer.cost import Explanation, explain
from jaxformer.data import DataConfig
from jaxformer.decode.beam import Beams, beam_search
from jaxformer.decode.drafts import DraftModel, MultiToken, PromptLookup
from jaxformer.decode.generate import Generated, generate
from jaxformer.decode.programs import compilations
from jaxformer.decode.sampling import Sampling
from jaxformer.decode.stream import Piece, stream
from jaxformer.nn import attention, block, mask, mlp, model, norm, position, rope, stack
from jaxformer.nn.attend import attend, mix
from jaxformer.nn.cache import Cache, LayerCache
from jaxformer.nn.cache_spec import init_cache
from jaxformer.nn.dense import dense
from jaxformer.nn.listening import capture, listen
from jaxformer.nn.logprobs import logprobs
from jaxformer.nn.mask import TokenInfo
from jaxformer.nn.model import Output, apply, forward, forward_cached, hidden, init
from jaxformer.nn.named import multiply, named
from jaxformer.parallel.host_memory import keep_memory
from jaxformer.parallel.sharding import MeshConfig
from jaxformer.prove.invariants import Invariant, Invariants, check_invariants
from jaxformer.tokenizers import tokenizer
from jaxformer.training.objective import loss
from jaxformer.training.optim import OptimConfig
from jaxformer.training.run import Config, TrainConfig, load

if TYPE_CHECKING:
    from jaxformer.interop import flax

__all__ = [
    "Beams",
    "Cache",
    "Component",
    "Config",
    "DataConfig",
    "DraftModel",
    "Execution",
    "Experts",
    "Explanation",
    "Generated",
    "Latent",
    "Invariant",
    "Invariants",
    "LayerCache",
    "MeshConfig",
    "ModelConfig",
    "MultiToken",
    "OptimConfig",
    "Output",
    "Param",
    "Piece",
    "PromptLookup",
    "RopeScaling",
    "Sampling",
    "TokenInfo",
    "TrainConfig",
    "apply",
    "attend",
    "attention",
    "beam_search",
    "bias",
    "block",
    "capture",
    "check_invariants",
    "compilations",
    "data",
    "decode",
    "dense",
    "explain",
    "flax",
    "forward",
    "forward_cached",
    "gain",
    "generate",
    "hf",
    "hidden",
    "init",
    "init_cache",
    "keep_memory",
    "listen",
    "load",
    "logprobs",
    "loss",
    "mask",
    "mix",
    "mlp",
    "model",
    "multiply",
    "named",
    "norm",
    "position",
    "presets",
    "rope",
    "spec",
    "stack",
    "stream",
    "tokenizer",
    "training",
    "weight",
]

for _record in (
    Config,
    DataConfig,
    Execution,
    Experts,
    Latent,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RopeScaling,
    Sampling,
    TrainConfig,
):
    document(_record)


def __getattr__(name: str) -> Any:
    if name == "flax":  # its modules of Linen and NNX are for those who use them
        return importlib.import_module("jaxformer.interop.flax")
    raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")
