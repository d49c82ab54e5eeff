"""What a model is: its config, the components that it names, the parameters that follow, the published sizes."""

from jaxformer.config.architecture import ModelConfig
from jaxformer.config.execution import Execution
from jaxformer.config.subconfigs import Experts, Latent, RopeScaling

__all__ = ["Execution", "Experts", "Latent", "ModelConfig", "RopeScaling"]
