"""How a model is computed and regularised in training: every setting that leaves the meaning of its parameters unchanged."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

from jaxformer.config.strict import Strict, dtype_name, within


@dataclass(frozen=True)
class Execution(Strict):
    """How the function of an architecture is computed, and what is added to it in training.

    A checkpoint fits a model whatever these fields say: a run may change any of them when it is resumed.
    """

    dtype: str = "float32"
    """Compute dtype. Norm statistics, softmax, rotary angles, router and loss stay float32. In float16, gradients below
    6e-8 are 0: from some 100,000 tokens per update on they are less exact than in bfloat16, which has float32's range."""
    scan: bool = False
    """Run the layers as one lax.scan (compiles once for all layers: right for deep models on accelerators) or unrolled
    (faster on CPUs). The parameters are the same."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes: none; dots, all but matrix products and the result of attention; full, everything
    inside a block."""
    remat_save: tuple[str, ...] = ()
    """Named activations to keep although remat would recompute them, such as attention.query, mlp.up or block.out."""
    attention_kernel: Literal["auto", "xla", "splash", "cudnn"] = "auto"
    """The program that computes attention: xla, plain XLA; splash, a kernel for TPUs; cudnn, for NVIDIA GPUs; auto, the
    device's own kernel where it can serve the call."""
    attention_dropout: float = 0.0
    """Dropout rate of the attention weights in training."""
    residual_dropout: float = 0.0
    """Dropout rate of each sublayer's output in training."""
    embedding_dropout: float = 0.0
    """Dropout rate after the embedding and its positions in training."""
    expert_dispatch: Literal["dropless", "capacity"] = "dropless"
    """dropless, every token reaches its experts; capacity, in training an expert takes at most expert_capacity tokens."""
    expert_capacity: float = 1.25
    """Tokens that an expert may take, as a multiple of an even share of the device's tokens (expert_dispatch=capacity); tokens
    beyond it skip the expert."""
    balance_loss: float = 0.0
    """Weight of the load-balancing loss, E·Σ f·P per layer, averaged over layers (Fedus et al. 2021, eq. 4)."""
    router_z_loss: float = 0.0
    """Weight of the mean squared logsumexp of the routers' logits (Zoph et al. 2022, eq. 5)."""
    balance_rate: float = 0.0
    """Amount by which each update raises the selection bias of experts with less than the mean load and lowers that of the
    others (Wang et al. 2024)."""

    def __post_init__(self):
        set_ = functools.partial(object.__setattr__, self)
        set_("dtype", dtype_name("dtype", self.dtype))
        if isinstance(self.remat_save, list):
            set_("remat_save", tuple(self.remat_save))
        super().__post_init__()
        within(self, 0, 1, *DROPOUTS)
        within(self, 0, math.inf, "balance_loss", "router_z_loss", "balance_rate")
        within(self, 0, math.inf, "expert_capacity", open_low=True)
        if self.remat_save and self.remat == "none":
            raise ValueError(
                f"remat_save={self.remat_save} has no effect with remat='none', which recomputes nothing; set remat too"
            )

    @property
    def has_dropout(self) -> bool:
        """Whether any rate of dropout is above 0."""
        return any(getattr(self, name) for name in DROPOUTS)


DROPOUTS = ("attention_dropout", "residual_dropout", "embedding_dropout")
NAMES = tuple(field.name for field in dataclasses.fields(Execution))


def routed(execution: Execution, fields: dict[str, Any]) -> dict[str, Any]:
    """Keywords of a ``ModelConfig`` with those that are fields of ``Execution`` moved into ``execution``."""
    changes = {name: fields.pop(name) for name in NAMES if name in fields}
    return fields | {"execution": dataclasses.replace(execution, **changes) if changes else execution}
