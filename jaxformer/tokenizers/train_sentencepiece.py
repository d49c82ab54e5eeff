"""Files of SentencePiece models: training one, and telling a complete one from a truncated one."""

import io
import itertools
import re
from collections.abc import Iterator, Sequence

_SAMPLE = 3_000_000  # characters that a model learns from: seconds, and more text hardly changes the pieces
_CHUNK = 2_000  # characters of one training sentence; line breaks inside it become parts of pieces


def sampled(texts: Sequence[str]) -> Iterator[str]:
    """About 3 M characters, at most, of the texts, in short parts spread evenly over all of them."""
    step = -(-sum(map(len, texts)) // _SAMPLE)
    chunks = (text[i : i + _CHUNK] for text in texts for i in range(0, len(text), _CHUNK))
    return itertools.islice(chunks, 0, None, step)


def train(kind: str, sample: Sequence[str], vocab_size: int) -> bytes:
    """The .model file of a bpe or unigram model that spells every text and gives it back exactly.

    Raises ValueError where ``vocab_size`` does not suit the sample, with the largest or smallest that does.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            character_coverage=0.9999,  # the rarest characters are spelt by their bytes
            max_sentence_length=8 * _CHUNK,  # bytes; longer ones would be left out
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            num_threads=2,  # a constant: sums in another order could give other pieces
            minloglevel=2,
        )
    except RuntimeError as error:
        if most := re.search(r"too high.*<= (\d+)", str(error)):
            raise ValueError(f"vocab_size={vocab_size} is too large for this text: at most {most[1]}") from error
        if least := re.search(r"required_chars.* vs (\d+)", str(error)):
            raise ValueError(f"vocab_size={vocab_size} is too small for this text: at least {least[1]}") from error
        raise ValueError(f"SentencePiece cannot train on this text: {error}") from error
    return model.getvalue()


def is_whole(model: bytes) -> bool:
    """Whether the bytes have the outer form of a .model file: pieces, then the settings of trainer and normalizer.

    SentencePiece itself accepts a file that was cut between two pieces, and would then use default settings.
    """
    return {2, 3} <= _message_fields(model)


def _message_fields(data: bytes) -> set[int]:
    """Numbers of a protobuf message's top-level fields; empty where one is cut off or not length-delimited."""
    fields, at = set(), 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while at < len(data):
            byte, at = data[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
        return 0

    while at < len(data):
        tag, size = varint(), varint()
        at += size
        if tag & 7 != 2 or at > len(data):
            return set()
        fields.add(tag >> 3)
    return fields
