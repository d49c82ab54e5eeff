"""Compares a loaded model with the results of another implementation for the same folder: quantity by quantity, layer by
layer."""

import functools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.config.spec import walk
from jaxformer.decode.beam import beam_search
from jaxformer.decode.generate import generate
from jaxformer.hf.families import FAMILIES
from jaxformer.hf.save import assemble, stored_tensors
from jaxformer.nn import model
from jaxformer.nn.listening import capture

TOLERANCE = 2e-4


class Row(NamedTuple):
    """One comparison."""

    quantity: str
    absolute: float
    """Largest absolute difference."""
    scale: float
    """Largest absolute value of the reference."""

    @property
    def relative(self) -> float:
        """The absolute difference over the scale."""
        return self.absolute / self.scale if self.scale else self.absolute


def compare(cfg: ModelConfig, params: dict, kind: str, reference: dict[str, np.ndarray], eos: Any, pad: Any) -> Iterator[Row]:
    """A row for each quantity in ``reference`` (arrays by name, as tests/golden/README.md describes them).

    kind: the folder's model_type. eos, pad: the ids that end generation, and that follow its end.

    Raises ValueError where the reference holds nothing to compare.
    """
    ref = {name: value for name, value in reference.items() if name not in ("config", "shapes")}
    if not any("logits" in name or "hidden" in name or name == "loss" for name in ref) or "input_ids" not in ref:
        raise ValueError(f"the reference holds nothing that can be compared, only: {', '.join(sorted(ref))}")
    ref.setdefault("attention_mask", np.ones(ref["input_ids"].shape, np.int32))
    inputs = _inputs(cfg, ref)
    yield from _hidden(cfg, params, ref)  # in the order of the forward: the first that is off is where to look
    yield from _outputs(cfg, params, ref, inputs)
    if "loss" in ref:
        yield from _loss(cfg, params, kind, ref)
    if "greedy_ids" in ref:
        yield from _greedy(cfg, params, ref, inputs, eos, pad)
    for name in ("beam", "beam2", "beam3"):
        if f"{name}_ids" in ref:
            yield from _beams(cfg, params, ref, inputs, name, eos, pad)


def row(quantity: str, result: Any, expected: Any, where: Any = ...) -> Row:
    """The comparison of two arrays, at ``where``."""
    result, expected = np.asarray(result, np.float64)[where], np.asarray(expected, np.float64)[where]
    scale = float(np.abs(expected).max(initial=0))
    if result.shape != expected.shape or not np.isfinite(result).all():
        return Row(quantity, float("inf"), scale)
    return Row(quantity, float(np.abs(result - expected).max(initial=0)), scale)


def _inputs(cfg, ref) -> dict[str, Any]:
    mask = ref["attention_mask"].astype(bool)
    if cfg.encoder_layers:
        return {"source": ref["input_ids"], "source_valid": mask}
    return {"valid": mask} | ({"token_types": ref["token_type_ids"]} if "token_type_ids" in ref else {})


@functools.partial(jax.jit, static_argnums=2)
def _forward(params, tokens, cfg, inputs):
    return model.forward(params, tokens, cfg, **inputs) if cfg.has_head else model.hidden(params, tokens, cfg, **inputs)


def _outputs(cfg, params, ref, inputs) -> Iterator[Row]:
    name = "logits" if cfg.has_head else "last_hidden_state"
    tokens = ref["decoder_input_ids"] if cfg.encoder_layers else ref["input_ids"]
    rows = ref.get("unpadded_rows", np.array([0, 2]))
    if f"{name}_padded" in ref:
        valid = np.ones(tokens.shape, bool) if cfg.encoder_layers else inputs["valid"]
        out = _forward(params, tokens, cfg, inputs)
        yield row(f"{name}, padded", out, ref[f"{name}_padded"], valid)
        if cfg.pooler and "pooler_output_padded" in ref:
            yield row("pooler output", model.pooled(params, out, cfg), ref["pooler_output_padded"])
    if f"{name}_unpadded" in ref:
        unpadded = {key: value[rows] for key, value in inputs.items() if key not in ("valid", "source_valid")}
        yield row(f"{name}, unpadded", _forward(params, tokens[rows], cfg, unpadded), ref[f"{name}_unpadded"])
    if "long_logits" in ref:
        yield row("logits past the original length", _forward(params, ref["long_input_ids"], cfg, {}), ref["long_logits"])


def _hidden(cfg, params, ref) -> Iterator[Row]:
    """Of row 0 alone: the input of the first layer, the output of each layer, and that of the final norm."""
    stacks = {"enc_": "encoder", "dec_": "decoder"} if cfg.encoder_layers else {"": "decoder"}
    if not any(f"{prefix}hidden_layers" in ref for prefix in stacks):
        return
    tokens = ref["decoder_input_ids"] if cfg.encoder_layers else ref["input_ids"]
    inputs = {name: value[:1] for name, value in _inputs(cfg, ref).items() if name not in ("valid", "source_valid")}
    run = jax.jit(capture(lambda params, tokens, inputs: model.hidden(params, tokens, cfg, **inputs), "*oder.*"))
    out, seen = run(params, tokens[:1], inputs)
    for prefix, stack in stacks.items():
        if f"{prefix}hidden_layers" not in ref:
            continue
        first = f"{stack}.in"
        if first in seen and f"{prefix}hidden_embed" in ref:
            yield row(f"{stack} input", seen[first][0], ref[f"{prefix}hidden_embed"])
        for number, expected in enumerate(ref[f"{prefix}hidden_layers"]):
            yield row(f"{stack} layer {number}", seen[f"{stack}.{number}.out"][0], expected)
        if f"{prefix}hidden_final" in ref and stack == "decoder":
            yield row(f"{stack} output", out[0], ref[f"{prefix}hidden_final"])


def _loss(cfg, params, kind, ref) -> Iterator[Row]:
    loss, grads = _loss_and_gradients(cfg, params, ref)
    yield row("loss", loss, ref["loss"])
    if "grad_names" not in ref:
        return
    arrays = dict(walk(grads))
    stored = stored_tensors(FAMILIES[kind], cfg)
    tensors = [assemble(stored[str(name)], arrays, cfg).astype(np.float64) for name in ref["grad_names"]]
    norms = np.array([np.sqrt((g**2).sum()) for g in tensors])
    probes = np.array([(g.ravel() * np.cos(np.arange(g.size))).sum() for g in tensors])
    yield row("gradient norms", norms, ref["grad_norms"])
    yield row("gradient probes", probes, ref["grad_probes"])


def _loss_and_gradients(cfg, params, ref):
    rows = ref.get("unpadded_rows", np.array([0, 2]))
    ids = ref["input_ids"][rows]
    types = {"token_types": ref["token_type_ids"][rows]} if "token_type_ids" in ref else {}

    def loss(params):
        if not cfg.has_head:
            hidden = model.hidden(params, ids, cfg, **types)
            wave = jnp.cos(jnp.arange(hidden.size)).reshape(hidden.shape)
            return (hidden * wave).mean() + (model.pooled(params, hidden, cfg) ** 2).mean()
        if cfg.encoder_layers:
            logits = model.forward(params, ref["decoder_input_ids"][rows], cfg, source=ids)
            labels = ref["labels"][rows]
        elif "labels" in ref:
            logits, labels = model.forward(params, ids, cfg, **types), ref["labels"][rows]
        else:
            logits, labels = model.forward(params, ids, cfg)[:, :-1], ids[:, 1:]
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        counted = labels >= 0
        return -(logp * counted).sum() / counted.sum()

    return jax.jit(jax.value_and_grad(loss))(params)


def _greedy(cfg, params, ref, inputs, eos, pad) -> Iterator[Row]:
    ids = ref["greedy_ids"]
    if cfg.encoder_layers:
        new = ids[:, 1:]
        out = generate(params, None, cfg, max_new_tokens=new.shape[1], eos=() if eos is None else eos, pad=pad, **inputs)
        logits = _forward(params, ids[:, :-1], cfg, inputs)
    else:
        start = ref["greedy_prompt"].shape[1]
        new = ids[:, start:]
        out = generate(params, ref["greedy_prompt"], cfg, max_new_tokens=new.shape[1])
        logits = _forward(params, ids[:, :-1], cfg, {})[:, start - 1 :]
    alive = np.arange(new.shape[1]) < np.asarray(out.lengths)[:, None]
    yield row("greedy ids", out.tokens, new, alive)
    steps = ref["greedy_step_logits"].reshape(*new.shape, -1)
    yield row("greedy logits", logits, steps, alive)


def _beams(cfg, params, ref, inputs, name, eos, pad) -> Iterator[Row]:
    defaults: dict[str, Any] = {"beam": (4, 1.0, False), "beam2": (4, 0.6, True), "beam3": (3, 2.0, "never")}
    beams, penalty, stopping = defaults[name]
    if "beams" in ref:
        settings = json.loads(str(ref["beams"]))[name]
        beams, penalty, stopping = (settings[key] for key in ("num_beams", "length_penalty", "early_stopping"))
        eos, pad = settings.get("eos_token_id", eos), settings.get("pad_token_id", pad)
    expected, prompt = ref[f"{name}_ids"], None if cfg.encoder_layers else ref["beam_prompt"]
    start = 1 if prompt is None else prompt.shape[1]
    out = beam_search(
        params,
        prompt,
        cfg,
        num_beams=beams,
        num_return=expected.shape[1],
        max_new_tokens=12,
        length_penalty=penalty,
        early_stopping=stopping,
        eos=eos,
        pad=pad or 0,
        **(inputs if cfg.encoder_layers else {}),
    )
    tokens = expected[:, :, start:]
    alive = np.arange(tokens.shape[2]) < np.asarray(out.lengths)[..., None]  # implementations differ in what follows
    yield row(f"{name} ids", np.asarray(out.tokens)[:, :, : tokens.shape[2]], tokens, alive)
    yield row(f"{name} scores", out.scores, ref[f"{name}_scores"])
