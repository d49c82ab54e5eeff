"""The peers of ``cpu.py``, on torch alone or with Hugging Face transformers: a worker that is told what to do line by line.

Nothing here imports jaxformer or JAX, so that a peer runs in an environment of its own.
"""

import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from worker import WORK, Work, serve


class Block(nn.Module):
    """A block of GPT-2 with PyTorch's fused attention: pre-norm, biases, GELU by tanh."""

    def __init__(self, work: Work):
        super().__init__()
        self.heads = work.heads
        self.norm1, self.norm2 = nn.LayerNorm(work.width), nn.LayerNorm(work.width)
        self.qkv, self.out = nn.Linear(work.width, 3 * work.width), nn.Linear(work.width, work.width)
        self.up, self.down = nn.Linear(work.width, work.hidden), nn.Linear(work.hidden, work.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]"""
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT-2, in the shape that nanoGPT trains: learned positions, tied head, no dropout."""

    def __init__(self, work: Work):
        super().__init__()
        self.token, self.position = nn.Embedding(work.vocab, work.width), nn.Embedding(work.length, work.width)
        self.blocks = nn.ModuleList(Block(work) for _ in range(work.layers))
        self.norm, self.head = nn.LayerNorm(work.width), nn.Linear(work.width, work.vocab, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else None
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V]."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def hugging_face(work: Work) -> nn.Module:
    """The model of the row by transformers, eager, with its logits as result."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if work.kv_heads == work.heads:
        sizes = {"n_layer": work.layers, "n_embd": work.width, "n_head": work.heads, "n_positions": work.length}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=work.vocab, **off))
    sizes = {"num_hidden_layers": work.layers, "hidden_size": work.width, "intermediate_size": work.hidden}
    heads = {"num_attention_heads": work.heads, "num_key_value_heads": work.kv_heads}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=work.vocab, tie_word_embeddings=False))


def trainer(model: nn.Module, is_hugging_face: bool, fused: bool):
    """A function of tokens [B, T + 1] that does one update by AdamW and gives the loss before it."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=fused)

    def step(tokens: np.ndarray) -> float:
        ids = torch.from_numpy(tokens.astype(np.int64))
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits if is_hugging_face else model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def main() -> None:
    row, peer = sys.argv[1:3]
    work, is_hugging_face = WORK[row], peer == "hugging-face"
    torch.manual_seed(0)
    model = hugging_face(work) if is_hugging_face else GPT(work)
    if work.does == "train":
        serve(work, trainer(model, is_hugging_face, fused=peer == "torch-fused"))
        return

    @torch.no_grad()
    def forward(tokens: np.ndarray) -> float:
        ids = torch.from_numpy(tokens[:, :-1].astype(np.int64))
        logits = model(input_ids=ids, use_cache=False).logits if is_hugging_face else model(ids)
        return float(logits[0, 0, 0])

    model.eval()
    serve(work, forward)


if __name__ == "__main__":
    main()
