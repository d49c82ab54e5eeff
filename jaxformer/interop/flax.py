"""Any config as a module of Flax, Linen or NNX: its parameters are the tree of ``jf.init``, its call is ``jf.forward``."""

from typing import Any

from flax import linen, nnx

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.nn import model


def linen_module(cfg: ModelConfig) -> "Linen":
    """A Linen module: ``params = module.init(key, tokens)["params"]``, ``logits = module.apply({"params": params}, tokens)``.

    Loaded parameters (``jf.hf.load``, ``jf.load``) are used as they are. The call takes the keywords of ``jf.forward``, and
    a cache; ``deterministic=False`` turns dropout on, with the random stream "dropout".
    """
    return Linen(cfg)


def nnx_module(cfg: ModelConfig, rngs: nnx.Rngs | None = None, params: dict | None = None) -> "NNX":
    """An NNX module with fresh parameters, of the stream ``rngs.params()``, or the given ones: ``logits = module(tokens)``.

    The call takes the keywords of ``jf.forward``, and a cache; after ``module.train()`` dropout is on, with the
    stream "dropout".
    """
    return NNX(cfg, rngs, params)


class Linen(linen.Module):
    """``linen_module``'s."""

    cfg: ModelConfig

    @linen.compact
    def __call__(self, tokens: Any, *, deterministic: bool = True, hidden: bool = False, **inputs: Any) -> Any:
        """Logits [B, T, V] of tokens [B, T], or with ``hidden`` what the head reads, [B, T, D]; with cache=, a pair with it."""

        def parameter(name: str) -> Any:
            return self.param(name, lambda key: specs.init({name: model.spec(self.cfg)[name]}, self.cfg, key)[name])

        params = {name: parameter(name) for name in model.spec(self.cfg)}
        if not deterministic:
            inputs["key"] = self.make_rng("dropout")
        return _output(params, tokens, self.cfg, hidden, **inputs)


class NNX(nnx.Module):
    """``nnx_module``'s. Its parameters are ``nnx.Param``s at their paths in our tree."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs | None = None, params: dict | None = None):
        if (params is None) == (rngs is None):
            raise ValueError("give either rngs, for fresh parameters, or params")
        if rngs is not None:
            params = model.init(cfg, rngs.params())
        assert params is not None
        model.check(params, cfg)
        self.cfg, self.deterministic = cfg, True
        for name, tree in params.items():
            setattr(self, name, _variables(tree))

    @property
    def params(self) -> dict:
        """The tree that every function of jaxformer takes."""
        return {name: _arrays(getattr(self, name)) for name in model.spec(self.cfg)}

    def __call__(self, tokens: Any, *, hidden: bool = False, rngs: nnx.Rngs | None = None, **inputs: Any) -> Any:
        """Logits [B, T, V] of tokens [B, T], or with ``hidden`` what the head reads, [B, T, D]; with cache=, a pair with it."""
        if not self.deterministic:
            if rngs is None:
                raise ValueError("dropout is on (module.train()); give rngs with a stream named dropout, or call module.eval()")
            inputs["key"] = rngs.dropout()
        return _output(self.params, tokens, self.cfg, hidden, **inputs)


def _output(params: dict, tokens: Any, cfg: ModelConfig, hidden: bool, cache: Any = None, **inputs: Any) -> Any:
    if cache is None:
        return (model.hidden if hidden else model.forward)(params, tokens, cfg, **inputs)
    out = model.apply(params, tokens, cfg, cache=cache, **inputs)
    return out.hidden if hidden else model.head(params, out.hidden, cfg), out.cache


def _variables(tree: Any) -> Any:
    return nnx.Dict({name: _variables(branch) for name, branch in tree.items()}) if isinstance(tree, dict) else nnx.Param(tree)


def _arrays(tree: Any) -> Any:
    return {name: _arrays(branch) for name, branch in tree.items()} if isinstance(tree, nnx.Dict) else tree[...]
