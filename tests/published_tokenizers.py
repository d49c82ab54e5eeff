"""Small tokenizer.json files, as models publish them: byte-level BPE in Qwen's manner, byte fallback in Llama 2's."""

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxformer.tokenizers import tokenizer

TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "def main():\n    return 'naïve café ✓ 日本'\n",
    "don't  stop, 42 times",
] * 20
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TURNS = (
    "{% for message in messages %}\n"
    "    <|im_start|>{{ message.role }}:{{ message.content }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
"""A chat template."""
CONFIGS = {
    "qwen": {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama": {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>", "pad_token": None, "add_bos_token": True},
}


def qwen() -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), level])
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    tok.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tok.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return tok


def llama() -> Tokenizer:
    learned = Tokenizer(models.BPE())
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learned.normalizer = spaces
    # No initial alphabet, and without its rare characters: those are for bytes to spell.
    trainer = trainers.BpeTrainer(vocab_size=120, limit_alphabet=40, show_progress=False)
    learned.train_from_iterator([line for text in TEXT for line in text.split("\n") if line.isascii()], trainer)
    model = json.loads(learned.to_str())["model"]
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *sorted(model["vocab"], key=model["vocab"].get),
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [tuple(pair) for pair in model["merges"]]
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tok.normalizer = spaces
    strip = decoders.Strip(" ", 1, 0)
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tok.add_special_tokens(["<unk>", "<s>", "</s>"])
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tok


@functools.cache
def content(name: str) -> str:
    """The tokenizer.json of "qwen" or "llama"."""
    return {"qwen": qwen, "llama": llama}[name]().to_str()


def folder(directory: Path, name: str, change=None, **files) -> Path:
    """A folder with that tokenizer.json and tokenizer_config.json. change: of the first, given as a dict; files: other ones, by
    their stem, {} standing for no file."""
    directory.mkdir(parents=True, exist_ok=True)
    values = json.loads(content(name))
    if change is not None:
        change(values)
    (directory / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    for stem, held in {"tokenizer_config": CONFIGS[name], **files}.items():
        if held != {}:
            (directory / f"{stem}.json").write_text(json.dumps(held), encoding="utf-8")
    return directory


def loaded(directory: Path, template=TURNS):
    """A "qwen" with a chat template."""
    config = {**CONFIGS["qwen"], **({} if template is None else {"chat_template": template})}
    return tokenizer.load(folder(directory, "qwen", tokenizer_config=config))


def user(content, **more):
    return {"role": "user", "content": content, **more}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}
