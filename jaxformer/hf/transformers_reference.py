"""What Hugging Face transformers computes for a folder: the arrays that ``verify`` compares with. This file alone needs torch
and transformers: import it where they are installed."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.numpy import load_file

BATCH, LENGTH, VALID, TARGETS, PROMPT = 3, 17, 11, 11, 5
UNPADDED = [0, 2]
EAGER = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if transformers.__version__ >= "5" else {})
NEW_TOKENS = 12
LAYERS, EMBEDDED, FINAL = ("layers", "h", "block", "layer"), "hidden_embed", "hidden_final"
FINAL_NORMS = ("norm", "ln_f", "final_layer_norm")


@torch.no_grad()
def reference(folder: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """The arrays that ``verify`` compares (see tests/golden/README.md), all but beams, of a folder's model for random inputs.

    Raises ValueError where transformers does not read the folder, or does not use all of it.
    """
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    name = (config.architectures or [None])[0]
    kind: Any = getattr(transformers, str(name), None)
    if not issubclass(kind if isinstance(kind, type) else object, transformers.PreTrainedModel):  # the file may name anything
        raise ValueError(f"{folder}/config.json: this transformers has no class for architectures={config.architectures}")
    options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}  # no pickles
    model, report = kind.from_pretrained(folder, **options, **EAGER)
    if left := {what: sorted(map(str, names)) for what, names in report.items() if names}:
        raise ValueError(f"{folder}: transformers does not load all of the folder either: {left}")
    model = without_padding_rows(model.eval())
    inputs = draw_inputs(np.random.RandomState(seed), config, masked=name.endswith("MaskedLM"))
    arrays = inputs | outputs(model, inputs) | hidden(model, inputs)
    if "greedy_prompt" in inputs or config.is_encoder_decoder:
        source = {key: ids(inputs[key]) for key in ("input_ids", "attention_mask")}
        prompt = source if config.is_encoder_decoder else {"input_ids": ids(inputs["greedy_prompt"])}
        sequences, logits, _ = greedy(model, prompt, end_of(config) if config.is_encoder_decoder else None)
        arrays |= {"greedy_ids": sequences, "greedy_step_logits": logits}
    return arrays | gradients(model, inputs)


def draw_inputs(rng: np.random.RandomState, config: Any, masked: bool) -> dict[str, np.ndarray]:
    """Random inputs for a model: ids without a special meaning, one of the rows padded. masked: labels for some of them."""
    special = {config.pad_token_id, end_of(config), getattr(config, "decoder_start_token_id", None)}
    words = np.asarray([token for token in range(3, config.vocab_size) if token not in special])
    inputs = {"input_ids": rng.choice(words, (BATCH, LENGTH)), "attention_mask": np.ones((BATCH, LENGTH), np.int32)}
    inputs["attention_mask"][1, VALID:] = 0
    inputs["input_ids"][1, VALID:] = config.pad_token_id or 0
    if hasattr(config, "type_vocab_size"):
        inputs["token_type_ids"] = rng.randint(0, config.type_vocab_size, (BATCH, LENGTH))
    if masked:
        chosen = (rng.rand(BATCH, LENGTH) < 0.4) & (inputs["attention_mask"] == 1)
        inputs["labels"] = np.where(chosen, rng.choice(words, (BATCH, LENGTH)), -100)
    if config.is_encoder_decoder:
        inputs["labels"] = rng.choice(words, (BATCH, TARGETS))
        if end_of(config) is not None:
            inputs["labels"][:, -1] = end_of(config)
        inputs["decoder_input_ids"] = np.roll(inputs["labels"], 1, 1)
        inputs["decoder_input_ids"][:, 0] = config.decoder_start_token_id
    elif "token_type_ids" not in inputs:
        inputs["greedy_prompt"] = rng.choice(words, (1, PROMPT))
    return {name: array.astype(np.int32) for name, array in inputs.items()}


def end_of(config: Any) -> int | None:
    """The id that ends a text, the first of several; None where it is not known."""
    eos = config.eos_token_id
    return eos[0] if isinstance(eos, list) else eos


def saved(model: Any) -> tuple[dict[str, np.ndarray], str]:
    """The tensors of the model's safetensors file and the text of its ``config.json``."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors"), (Path(folder) / "config.json").read_text()


def without_padding_rows(model: Any) -> Any:
    """Gradients of every row of the embeddings; torch zeroes that of padding. The outputs do not depend on it."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    return model


def ids(array: np.ndarray) -> torch.Tensor:
    """Ids as a tensor of torch."""
    return torch.from_numpy(np.asarray(array, np.int64))


def arguments(inputs: dict[str, np.ndarray], rows: list[int] | None = None) -> dict[str, torch.Tensor]:
    """Arguments of the forward: the batch with its mask, or some rows without a mask."""
    names = ["input_ids", "token_type_ids", "decoder_input_ids"] + ["attention_mask"] * (rows is None)
    return {name: ids(inputs[name][slice(None) if rows is None else rows]) for name in names if name in inputs}


def outputs(model: Any, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs of the batch with its mask (0 where not valid), and of the rows without padding, without a mask."""
    batch, alone = model(**arguments(inputs)), model(**arguments(inputs, UNPADDED))
    mask = inputs["attention_mask"].astype(bool)
    valid = np.ones_like(inputs["decoder_input_ids"], bool) if "decoder_input_ids" in inputs else mask
    key = "logits" if "logits" in batch else "last_hidden_state"
    arrays = {
        f"{key}_padded": batch[key].numpy() * valid[..., None],
        f"{key}_unpadded": alone[key].numpy(),
        "unpadded_rows": np.asarray(UNPADDED, np.int32),
        "valid": valid,
    }
    if "pooler_output" in batch:
        arrays["pooler_output_padded"] = batch["pooler_output"].numpy()
    elif "token_type_ids" in inputs:
        arrays["last_hidden_state_padded"] = model.base_model(**arguments(inputs)).last_hidden_state.numpy() * valid[..., None]
    if "encoder_last_hidden_state" in batch:
        arrays["encoder_last_hidden_padded"] = batch["encoder_last_hidden_state"].numpy() * mask[..., None]
        arrays["encoder_valid"] = mask
    if "long_input_ids" in inputs:
        arrays["long_logits"] = model(ids(inputs["long_input_ids"])).logits.numpy()
    return arrays


def stacks(model: Any) -> dict[str, Any]:
    """The modules that hold layers, by the prefix of their arrays' names."""
    base = model.base_model
    if model.config.is_encoder_decoder:
        return {"enc_": base.encoder, "dec_": base.decoder}
    return {"": getattr(base, "encoder", base)}


def hidden(model: Any, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hidden states of row 0 alone: the input of the first layer, and the output of each layer and of a final norm."""
    arrays: dict[str, Any] = {}
    hooks = []

    def tensor(value: Any) -> np.ndarray:
        return (value if isinstance(value, torch.Tensor) else value[0])[0].numpy().copy()

    def watch(prefix: str, stack: Any) -> None:
        layers = next(getattr(stack, name) for name in LAYERS if hasattr(stack, name))
        norm = next((getattr(stack, name) for name in FINAL_NORMS if hasattr(stack, name)), None)
        outs = arrays.setdefault(f"{prefix}hidden_layers", [])

        def enter(_, args, kwargs):
            arrays[prefix + EMBEDDED] = tensor(args or kwargs["hidden_states"])

        hooks.append(layers[0].register_forward_pre_hook(enter, with_kwargs=True))
        hooks.extend(layer.register_forward_hook(lambda _, args, out: outs.append(tensor(out))) for layer in layers)
        if norm is not None:
            hooks.append(norm.register_forward_hook(lambda _, args, out: arrays.update({prefix + FINAL: tensor(out)})))

    for prefix, stack in stacks(model).items():
        watch(prefix, stack)
    model(**arguments(inputs, [0]))
    for hook in hooks:
        hook.remove()
    return {name: np.stack(value) if isinstance(value, list) else value for name, value in arrays.items()}


def loss(model: Any, inputs: dict[str, np.ndarray], padded: bool) -> torch.Tensor:
    """Mean cross-entropy of the tokens to predict; for a model without logits, a mean that depends on every output."""
    out = model(**arguments(inputs, None if padded else UNPADDED))
    if "logits" not in out:
        h = out.last_hidden_state
        if padded:
            raise ValueError("a model without logits has no loss over padding")
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
    """The loss, and its gradient under the names and in the layout of the safetensors file. It spoils the model."""
    losses = {} if "pooler_output" in model(**arguments(inputs)) else {"loss_padded": loss(model, inputs, padded=True)}
    losses["loss"] = loss(model, inputs, padded=False)
    losses["loss"].backward()
    losses = {name: np.float32(value.item()) for name, value in losses.items()}
    for parameter in model.parameters():
        parameter.data = parameter.grad
    fixed = dict(model.named_buffers())
    grads = {name: g.astype(np.float64).ravel() for name, g in sorted(saved(model)[0].items()) if name not in fixed}
    norms = [np.linalg.norm(g) for g in grads.values()]
    probes = [g @ np.cos(np.arange(g.size)) for g in grads.values()]
    return losses | {
        "grad_names": np.asarray(list(grads)),
        "grad_norms": np.asarray(norms, np.float32),
        "grad_probes": np.asarray(probes, np.float32),
    }


def generate(model: Any, prompt: dict[str, torch.Tensor], eos: int | None, **settings: Any) -> Any:
    """The result of transformers' ``generate``, with logits and scores."""
    config = model.config
    model.generation_config = transformers.GenerationConfig(
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=config.pad_token_id or 0,
        decoder_start_token_id=getattr(config, "decoder_start_token_id", None),
        **settings,
    )
    return model.generate(**prompt, return_dict_in_generate=True, output_logits=True, output_scores=True)


def pad_after_end(sequences: np.ndarray, start: int, eos: int | None, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """``sequences`` with the padding token after their end, and the number of new tokens of each, its end included."""
    is_end = sequences[..., start:] == eos if eos is not None else np.zeros_like(sequences[..., start:], bool)
    lengths = np.where(is_end.any(-1), is_end.argmax(-1) + 1, sequences.shape[-1] - start)
    return np.where(np.arange(sequences.shape[-1]) < start + lengths[..., None], sequences, pad), lengths


def greedy(model: Any, prompt: dict[str, torch.Tensor], eos: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids [B, T], logits of every step [B, steps, V] (0 after the end) and lengths [B] of greedy decoding."""
    out = generate(model, prompt, eos, num_beams=1, max_new_tokens=NEW_TOKENS)
    start = out.sequences.shape[1] - len(out.logits)
    sequences, lengths = pad_after_end(out.sequences.numpy(), start, eos, model.generation_config.pad_token_id)
    logits = torch.stack(out.logits, 1).float().numpy()
    return sequences, logits * (np.arange(logits.shape[1]) < lengths[:, None])[..., None], lengths
