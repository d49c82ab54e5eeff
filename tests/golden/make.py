"""Makes the fixtures of this folder again, or those named.

    pip install -e . torch==2.13.0 transformers==5.24.0
    python tests/golden/make.py [name ...]

in an environment of its own: the project needs neither of the two. Seeds are tried in order until one gives results that no
rounding decides; the same versions on the same machine write the same files.
"""

import collections
import json
import logging
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from cases import CASES, Case
from safetensors.numpy import save_file
from weights import FOLDER, draw

from jaxformer.hf import transformers_reference as reference
from jaxformer.hf.transformers_reference import EAGER, NEW_TOKENS, PROMPT, VALID

TRIES = 400
MARGIN = 0.01
"""Between the two best tokens of a greedy step, a thousand times what float32 changes."""
NOISE = 2e-6
"""Relative, on the weights: 16 units in float32's last place."""
ROUNDING = 1e-5
"""What may separate float32 from float64 in the outputs, which are of order 1."""
SEEN = 5e-4
"""A config change that a fixture is there for moves some output by more: fifty times what float32 does. GELU's two forms, which
differ by 5e-4 themselves, come closest to it."""
SOURCE = ("input_ids", "attention_mask", "token_type_ids")
_BEAM = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": NEW_TOKENS}
BEAMS: dict[str, dict[str, Any]] = {
    "beam": _BEAM | {"length_penalty": 1.0, "early_stopping": False},
    "beam2": _BEAM | {"length_penalty": 0.6, "early_stopping": True},
    "beam3": _BEAM | {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 2.0, "early_stopping": "never"},
}


class Refused(Exception):
    """This seed's results depend on rounding, or show too little."""


def require(holds: Any, why: str) -> None:
    if not holds:
        raise Refused(why)


def configured(name: str, keywords: dict[str, Any]) -> Any:
    """The config of the class ``name``."""
    return getattr(transformers, name).config_class(**keywords)


def shapes_of(name: str, config: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a file of the class ``name`` holds."""
    return {key: value.shape for key, value in sorted(reference.saved(getattr(transformers, name)(config))[0].items())}


def model_of(name: str, config: Any, tensors: dict[str, np.ndarray]) -> Any:
    """The model with exactly these tensors, read from a file as a user's would be."""
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        transformers.GenerationConfig().save_pretrained(folder)  # from_pretrained looks for it
        model, report = getattr(transformers, name).from_pretrained(
            folder, config=config, dtype=torch.float32, **EAGER, output_loading_info=True
        )
    assert not any(report.values()), report
    again = reference.saved(model)[0]
    assert again.keys() == tensors.keys() and all(np.array_equal(again[key], tensors[key]) for key in tensors), (
        "not what it read"
    )
    return reference.without_padding_rows(model.eval())


def beams(model: Any, prompt: dict[str, torch.Tensor], eos: int) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Ids [B, n, T], scores [B, n] and lengths [B, n] of every setting, best first."""
    results = {}
    start = 1 if model.config.is_encoder_decoder else prompt["input_ids"].shape[1]
    for name, settings in BEAMS.items():
        out = reference.generate(model, prompt, eos, **settings)
        shape = (-1, settings["num_return_sequences"])
        sequences, lengths = reference.pad_after_end(out.sequences.numpy(), start, eos, model.generation_config.pad_token_id)
        results[name] = (
            sequences.reshape(*shape, sequences.shape[-1]),
            out.sequences_scores.numpy().reshape(shape),
            lengths.reshape(shape),
        )
    return results


def inputs_of(case: Case, config: Any, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.RandomState(seed)
    found = reference.draw_inputs(rng, config, masked=case.model.endswith("MaskedLM"))
    words = np.setdiff1d(
        np.arange(3, config.vocab_size), [i for i in (config.pad_token_id, config.eos_token_id) if i is not None]
    )
    more = {"long_input_ids": (1, case.long)} if case.long else {}
    more |= {"beam_prompt": (2, PROMPT)} if case.beams else {}
    return found | {name: rng.choice(words, shape).astype(np.int32) for name, shape in more.items()}


def prompts(inputs: dict[str, np.ndarray]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor] | None]:
    """Of the greedy and of the beam search."""
    if "decoder_input_ids" in inputs:
        source = {name: reference.ids(inputs[name]) for name in ("input_ids", "attention_mask")}
        return source, source
    prompt, several = (
        {"input_ids": reference.ids(inputs[name]), "attention_mask": torch.ones(inputs[name].shape, dtype=torch.int64)}
        if name in inputs
        else None
        for name in ("greedy_prompt", "beam_prompt")
    )
    return prompt, several


def search(models: list[Any], inputs: dict[str, np.ndarray], report: dict[str, Any]) -> dict[str, np.ndarray]:
    """Greedy and beam search of the first model, which the others (float64, noisy weights) must confirm."""
    config = models[0].config
    prompt, several = prompts(inputs)
    eos = config.eos_token_id if config.is_encoder_decoder else None
    sequences, logits, lengths = reference.greedy(models[0], prompt, eos)
    best = np.sort(logits, -1)[..., -2:]
    margin = (best[..., 1] - best[..., 0])[np.arange(logits.shape[1]) < lengths[:, None]].min()
    report |= {"greedy_margin": float(margin), "greedy_distinct": len(np.unique(sequences[:, -NEW_TOKENS:]))}
    require(margin > MARGIN, "greedy margin")
    require(report["greedy_distinct"] >= 5, "greedy repeats itself")
    if eos is not None:
        require(len(set(lengths)) > 1 and lengths.max() == NEW_TOKENS, "greedy rows end together")
    for other in models[1:]:
        require(np.array_equal(reference.greedy(other, prompt, eos)[0], sequences), "greedy depends on rounding")
    found = {"greedy_ids": sequences, "greedy_step_logits": logits if eos is not None else logits[0]}
    if several is None:
        return found
    results = beams(models[0], several, config.eos_token_id)
    for name, (_, scores, lengths) in results.items():
        report[f"{name}_lengths"] = np.unique(lengths).tolist()
        require(np.diff(-scores).min() > 1e-4, "beam scores tie")
    require(len(report["beam_lengths"]) >= 4 and len(report["beam2_lengths"]) >= 3, "beams end together")
    require(any(results[n][0].tolist() != results["beam"][0].tolist() for n in ("beam2", "beam3")), "settings do not matter")
    for other in models[1:]:
        for name, (sequences, _, _) in beams(other, several, config.eos_token_id).items():
            require(np.array_equal(sequences, results[name][0]), "beams depend on rounding")
    for name, (sequences, scores, _) in results.items():
        found |= {f"{name}_ids": sequences, f"{name}_scores": scores}
    tokens = {"eos_token_id": config.eos_token_id, "pad_token_id": models[0].generation_config.pad_token_id}
    found["beams"] = np.asarray(json.dumps({name: settings | tokens for name, settings in BEAMS.items()}))
    return found


def ends(case: Case, tensors: dict[str, np.ndarray], seed: int) -> list[int | None]:
    """End tokens to try: those that occur in beams which do not end, the commonest first."""
    config = configured(case.model, case.config)
    if not (case.beams or config.is_encoder_decoder):
        return [None]
    _, several = prompts(inputs_of(case, config, seed))
    found = reference.generate(model_of(case.model, config, tensors), several, None, **BEAMS["beam"])
    tokens, counts = np.unique(found.sequences[:, -NEW_TOKENS:].numpy(), return_counts=True)
    special = {config.pad_token_id, getattr(config, "decoder_start_token_id", None)}
    return [int(token) for token in tokens[np.argsort(-counts, kind="stable")] if token not in special][:4]


def largest(one: dict[str, np.ndarray], other: dict[str, np.ndarray], key: str) -> float:
    return float(np.abs(one[key] - other[key]).max())


def padding(model: Any, inputs: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> dict[str, float]:
    """How far the padded row is from the same row without padding, and from the same row without a mask."""
    key = next(name for name in found if name in ("logits_padded", "last_hidden_state_padded"))
    cut = {name: array[:, :VALID] if name in SOURCE else array for name, array in inputs.items()}
    no_mask = inputs | {"attention_mask": np.ones_like(inputs["attention_mask"])}
    alone, unmasked = reference.outputs(model, cut)[key][1, :VALID], reference.outputs(model, no_mask)[key][1, :VALID]
    masked = found[key][1, :VALID]
    report = {"padded_alone": float(np.abs(masked - alone).max()), "unmasked": float(np.abs(masked - unmasked).max())}
    assert report["padded_alone"] < ROUNDING, f"the mask does not hide padding: {report}"
    assert "greedy_prompt" in inputs or report["unmasked"] > SEEN, f"no padding is seen: {report}"  # causal rows never see it
    return report


def attempt(case: Case, seed: int, eos: int | None, tensors: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
    keywords = dict(case.config)
    if eos is not None:
        starts_with_end = keywords.get("decoder_start_token_id") == keywords["eos_token_id"]
        keywords |= {"eos_token_id": eos} | ({"decoder_start_token_id": eos} if starts_with_end else {})

    def built(changes: dict[str, Any] | None = None, noise: float = 0.0) -> Any:
        rng = np.random.RandomState(seed)
        noisy = {name: (t * (1 + noise * rng.standard_normal(t.shape))).astype(np.float32) for name, t in tensors.items()}
        return model_of(case.model, configured(case.model, keywords | (changes or {})), noisy)

    model = built()
    inputs = inputs_of(case, model.config, seed)
    found = reference.outputs(model, inputs)
    report: dict[str, Any] = {"eos": eos}
    double = built().double()
    if "greedy_prompt" in inputs or "decoder_input_ids" in inputs:
        found |= search([model, double, built(noise=NOISE)], inputs, report)
    key = next(name for name in found if name.endswith("_unpadded"))
    report |= {"std": float(found[key].std()), "float64": largest(reference.outputs(double, inputs), found, key)}
    require(report["float64"] < ROUNDING, "ill-conditioned")
    changed = [reference.outputs(built(change), inputs) for change in case.changes]
    report["changes"] = [
        max(largest(other, found, name) for name in (key, "long_logits") if name in found) for other in changed
    ]
    assert min(report["changes"], default=1.0) > SEEN, f"blind: {report}"
    report |= padding(model, inputs, found)
    config = reference.saved(model)[1]
    if case.config.get("tie_word_embeddings") is False:  # T5's config overrides it; the published 1.1 files say false
        config = config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    found |= reference.hidden(model, inputs) | reference.gradients(model, inputs)
    return {"config": np.asarray(config)} | inputs | found, report


def make(name: str) -> None:
    case = CASES[name]
    shapes = shapes_of(case.model, configured(case.model, case.config)) | case.extra
    first = zlib.crc32(name.encode()) % 10_000  # cases of the same shapes have different weights
    refusals: collections.Counter[str] = collections.Counter()
    for seed in range(first, first + TRIES):
        tensors = draw(shapes, seed, case.gain, case.embedding)
        for eos in ends(case, tensors, seed):
            try:
                found, report = attempt(case, seed, eos, tensors)
            except Refused as refusal:
                refusals[str(refusal)] += 1
                continue
            about = {"shapes": np.asarray(json.dumps(shapes)), "seed": np.int32(seed)}
            about |= {"gain": np.float64(case.gain), "embedding": np.float64(case.embedding)}
            path = FOLDER / f"{name}.npz"
            np.savez_compressed(path, **about, **{key: narrowed(array) for key, array in found.items()})
            print(name, {"seed": seed, "bytes": path.stat().st_size, "refused": dict(refusals)} | report, flush=True)
            return
    raise SystemExit(f"{name}: no seed of {TRIES} will do, {refusals}")


def narrowed(array: np.ndarray) -> np.ndarray:
    kinds = {"f": np.float32, "i": np.int32}
    return np.asarray(array).astype(kinds.get(array.dtype.kind, array.dtype))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # sums in one order
    torch.set_grad_enabled(False)
    for chosen in sys.argv[1:] or CASES:
        make(chosen)
