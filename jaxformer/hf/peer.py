"""What Hugging Face transformers makes of a model, as the arrays that ``verify`` compares with. Needs torch and transformers,
as nothing else here does, and is imported only where they are asked for."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.numpy import load_file, save_file

BATCH, LENGTH, VALID, TARGETS, PROMPT = 3, 17, 11, 11, 5
UNPADDED = [0, 2]
EAGER = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if transformers.__version__ >= "5" else {})
SOURCE = ("input_ids", "attention_mask", "token_type_ids")
NEW_TOKENS = 12
_BEAM = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": NEW_TOKENS}
BEAMS: dict[str, dict[str, Any]] = {
    "beam": _BEAM | {"length_penalty": 1.0, "early_stopping": False},
    "beam2": _BEAM | {"length_penalty": 0.6, "early_stopping": True},
    "beam3": _BEAM | {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 2.0, "early_stopping": "never"},
}
LAYERS, EMBEDDED, FINAL = ("layers", "h", "block", "layer"), "hidden_embed", "hidden_final"
FINAL_NORMS = ("norm", "ln_f", "final_layer_norm")


@torch.no_grad()
def reference(folder: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """All that ``verify`` compares (tests/golden/README.md describes it), of a folder's model for drawn inputs, but for beams.

    Raises ValueError where transformers does not read the folder, or does not use all of it.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    name = (config.architectures or [None])[0]
    if not hasattr(transformers, str(name)):
        raise ValueError(f"{folder}/config.json: this transformers has no class for architectures={config.architectures}")
    model, report = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, **EAGER, output_loading_info=True)
    if left := {what: sorted(map(str, found)) for what, found in report.items() if found}:
        raise ValueError(f"{folder}: transformers itself does not use the folder as it is: {left}")
    model = without_padding_rows(model.eval())
    inputs = drawn(np.random.RandomState(seed), config, masked=name.endswith("MaskedLM"))
    found = inputs | outputs(model, inputs) | hidden(model, inputs)
    if "greedy_prompt" in inputs or config.is_encoder_decoder:
        source = {key: ids(inputs[key]) for key in ("input_ids", "attention_mask")}
        prompt = source if config.is_encoder_decoder else {"input_ids": ids(inputs["greedy_prompt"])}
        sequences, logits, _ = greedy(model, prompt, config.eos_token_id if config.is_encoder_decoder else None)
        found |= {"greedy_ids": sequences, "greedy_step_logits": logits}
    return found | gradients(model, inputs)


def drawn(rng: np.random.RandomState, config: Any, masked: bool) -> dict[str, np.ndarray]:
    """Inputs for a model: ids that stand for nothing special, one row of them padded."""
    special = {config.pad_token_id, config.eos_token_id, getattr(config, "decoder_start_token_id", None)}
    words = np.asarray([token for token in range(3, config.vocab_size) if token not in special])
    found = {"input_ids": rng.choice(words, (BATCH, LENGTH)), "attention_mask": np.ones((BATCH, LENGTH), np.int32)}
    found["attention_mask"][1, VALID:] = 0
    found["input_ids"][1, VALID:] = config.pad_token_id or 0
    if hasattr(config, "type_vocab_size"):
        found["token_type_ids"] = rng.randint(0, config.type_vocab_size, (BATCH, LENGTH))
    if masked:
        chosen = (rng.rand(BATCH, LENGTH) < 0.4) & (found["attention_mask"] == 1)
        found["labels"] = np.where(chosen, rng.choice(words, (BATCH, LENGTH)), -100)
    if config.is_encoder_decoder:
        found["labels"] = rng.choice(words, (BATCH, TARGETS))
        found["labels"][:, -1] = config.eos_token_id
        found["decoder_input_ids"] = np.roll(found["labels"], 1, 1)
        found["decoder_input_ids"][:, 0] = config.decoder_start_token_id
    elif "token_type_ids" not in found:
        found["greedy_prompt"] = rng.choice(words, (1, PROMPT))
    return {name: array.astype(np.int32) for name, array in found.items()}


def configured(name: str, keywords: dict[str, Any]) -> Any:
    """The config of the class ``name``."""
    return getattr(transformers, name).config_class(**keywords)


def stored(model: Any) -> tuple[dict[str, np.ndarray], str]:
    """The tensors of the model's safetensors file and the text of its ``config.json``."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors"), (Path(folder) / "config.json").read_text()


def shapes_of(name: str, config: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a file of the class ``name`` holds."""
    return {key: value.shape for key, value in sorted(stored(getattr(transformers, name)(config))[0].items())}


def built(name: str, config: Any, tensors: dict[str, np.ndarray]) -> Any:
    """The model with exactly these tensors, read from a file as a user's would be."""
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        transformers.GenerationConfig().save_pretrained(folder)  # it is looked for
        model, report = getattr(transformers, name).from_pretrained(
            folder, config=config, dtype=torch.float32, **EAGER, output_loading_info=True
        )
    assert not any(report.values()), report
    again = stored(model)[0]
    assert again.keys() == tensors.keys() and all(np.array_equal(again[key], tensors[key]) for key in tensors), (
        "not what it read"
    )
    return without_padding_rows(model.eval())


def without_padding_rows(model: Any) -> Any:
    """Gradients of every row of the embeddings; torch zeroes that of padding. The outputs do not depend on it."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    return model


def ids(array: np.ndarray) -> torch.Tensor:
    """As torch takes ids."""
    return torch.from_numpy(np.asarray(array, np.int64))


def arguments(inputs: dict[str, np.ndarray], rows: list[int] | None = None) -> dict[str, torch.Tensor]:
    """Of the forward: the whole batch with its mask, or some rows without any."""
    names = ["input_ids", "token_type_ids", "decoder_input_ids"] + ["attention_mask"] * (rows is None)
    return {name: ids(inputs[name][slice(None) if rows is None else rows]) for name in names if name in inputs}


def outputs(model: Any, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs of the whole batch with the mask (where valid, else 0), and of the full rows without any mask."""
    batch, alone = model(**arguments(inputs)), model(**arguments(inputs, UNPADDED))
    mask = inputs["attention_mask"].astype(bool)
    valid = np.ones_like(inputs["decoder_input_ids"], bool) if "decoder_input_ids" in inputs else mask
    key = "logits" if "logits" in batch else "last_hidden_state"
    found = {
        f"{key}_padded": batch[key].numpy() * valid[..., None],
        f"{key}_unpadded": alone[key].numpy(),
        "unpadded_rows": np.asarray(UNPADDED, np.int32),
        "valid": valid,
    }
    if "pooler_output" in batch:
        found["pooler_output_padded"] = batch["pooler_output"].numpy()
    elif "token_type_ids" in inputs:
        found["last_hidden_state_padded"] = model.base_model(**arguments(inputs)).last_hidden_state.numpy() * valid[..., None]
    if "encoder_last_hidden_state" in batch:
        found["encoder_last_hidden_padded"] = batch["encoder_last_hidden_state"].numpy() * mask[..., None]
        found["encoder_valid"] = mask
    if "long_input_ids" in inputs:
        found["long_logits"] = model(ids(inputs["long_input_ids"])).logits.numpy()
    return found


def stacks(model: Any) -> dict[str, Any]:
    """The modules that hold layers, by the prefix of their arrays' names."""
    base = model.base_model
    if model.config.is_encoder_decoder:
        return {"enc_": base.encoder, "dec_": base.decoder}
    return {"": getattr(base, "encoder", base)}


def hidden(model: Any, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of row 0 alone: what enters the first layer, leaves each layer, and leaves the final norm where there is one."""
    found: dict[str, Any] = {}
    hooks = []

    def tensor(value: Any) -> np.ndarray:
        return (value if isinstance(value, torch.Tensor) else value[0])[0].numpy().copy()

    def watch(prefix: str, stack: Any) -> None:
        layers = next(getattr(stack, name) for name in LAYERS if hasattr(stack, name))
        norm = next((getattr(stack, name) for name in FINAL_NORMS if hasattr(stack, name)), None)
        raw = found.setdefault(f"{prefix}hidden_layers", [])

        def enter(_, args, kwargs):
            found[prefix + EMBEDDED] = tensor(args or kwargs["hidden_states"])

        hooks.append(layers[0].register_forward_pre_hook(enter, with_kwargs=True))
        hooks.extend(layer.register_forward_hook(lambda _, args, out: raw.append(tensor(out))) for layer in layers)
        if norm is not None:
            hooks.append(norm.register_forward_hook(lambda _, args, out: found.update({prefix + FINAL: tensor(out)})))

    for prefix, stack in stacks(model).items():
        watch(prefix, stack)
    model(**arguments(inputs, [0]))
    for hook in hooks:
        hook.remove()
    return {name: np.stack(value) if isinstance(value, list) else value for name, value in found.items()}


def loss(model: Any, inputs: dict[str, np.ndarray], padded: bool) -> torch.Tensor:
    """Mean cross-entropy over what is to be predicted; of a model without logits, a mean that sees every number."""
    out = model(**arguments(inputs, None if padded else UNPADDED))
    if "logits" not in out:
        h = out.last_hidden_state
        if padded:
            raise ValueError("a mean over padding means nothing")
        weights = torch.cos(torch.arange(h.numel(), dtype=h.dtype)).reshape(h.shape)
        return (h * weights).mean() + (out.pooler_output**2).mean()
    rows = slice(None) if padded else UNPADDED
    if "labels" in inputs:
        logits, labels = out.logits, inputs["labels"][rows]
    else:
        seen = inputs["attention_mask"][rows].astype(bool)
        logits, labels = out.logits[:, :-1], np.where(seen, inputs["input_ids"][rows], -100)[:, 1:]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids(labels).reshape(-1))


@torch.enable_grad()
def gradients(model: Any, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The loss, and its gradient under the names and in the layout of the safetensors file. Leaves the model spoilt."""
    found = {} if "pooler_output" in model(**arguments(inputs)) else {"loss_padded": loss(model, inputs, padded=True)}
    found["loss"] = loss(model, inputs, padded=False)
    found["loss"].backward()
    found = {name: np.float32(value.item()) for name, value in found.items()}
    for parameter in model.parameters():
        parameter.data = parameter.grad
    fixed = dict(model.named_buffers())
    grads = {name: g.astype(np.float64).ravel() for name, g in sorted(stored(model)[0].items()) if name not in fixed}
    norms = [np.linalg.norm(g) for g in grads.values()]
    probes = [g @ np.cos(np.arange(g.size)) for g in grads.values()]
    return found | {
        "grad_names": np.asarray(list(grads)),
        "grad_norms": np.asarray(norms, np.float32),
        "grad_probes": np.asarray(probes, np.float32),
    }


def generated(model: Any, prompt: dict[str, torch.Tensor], eos: int | None, **settings: Any) -> Any:
    """What ``generate`` gives, with logits and scores."""
    config = model.config
    model.generation_config = transformers.GenerationConfig(
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=config.pad_token_id or 0,
        decoder_start_token_id=getattr(config, "decoder_start_token_id", None),
        **settings,
    )
    return model.generate(**prompt, return_dict_in_generate=True, output_logits=True, output_scores=True)


def ended(sequences: np.ndarray, start: int, eos: int | None, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """``sequences`` with the padding token after their end, and each one's number of new tokens, its end included."""
    is_end = sequences[..., start:] == eos if eos is not None else np.zeros_like(sequences[..., start:], bool)
    lengths = np.where(is_end.any(-1), is_end.argmax(-1) + 1, sequences.shape[-1] - start)
    return np.where(np.arange(sequences.shape[-1]) < start + lengths[..., None], sequences, pad), lengths


def greedy(model: Any, prompt: dict[str, torch.Tensor], eos: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, logits of every step [B, steps, V] (0 after the end) and lengths."""
    out = generated(model, prompt, eos, num_beams=1, max_new_tokens=NEW_TOKENS)
    start = out.sequences.shape[1] - len(out.logits)
    sequences, lengths = ended(out.sequences.numpy(), start, eos, model.generation_config.pad_token_id)
    logits = torch.stack(out.logits, 1).float().numpy()
    return sequences, logits * (np.arange(logits.shape[1]) < lengths[:, None])[..., None], lengths


def beams(model: Any, prompt: dict[str, torch.Tensor], eos: int) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Ids [B, n, T], scores [B, n] and lengths [B, n] of every setting, best first."""
    found = {}
    start = 1 if model.config.is_encoder_decoder else prompt["input_ids"].shape[1]
    for name, settings in BEAMS.items():
        out = generated(model, prompt, eos, **settings)
        shape = (-1, settings["num_return_sequences"])
        sequences, lengths = ended(out.sequences.numpy(), start, eos, model.generation_config.pad_token_id)
        found[name] = (
            sequences.reshape(*shape, sequences.shape[-1]),
            out.sequences_scores.numpy().reshape(shape),
            lengths.reshape(shape),
        )
    return found
