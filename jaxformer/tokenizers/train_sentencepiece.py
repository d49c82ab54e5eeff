"""Files of SentencePiece models: training one, and telling a complete one from a truncated one."""

import io
import itertools
import re
from collections.abc import Iterator, Sequence

from jaxformer.tokenizers import checks

INCOMPLETE = "not a complete SentencePiece model (empty, truncated or another format)"
PIECES, TRAINER, NORMALIZERS, CHARACTER_MAP = 1, 2, (3, 5), 2
CONTROL_TEXTS = range(44, 49)
"""Numbers of fields in sentencepiece_model.proto."""
MOST_PIECES = 1 << 20
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
        asked = f"a tokenizer with vocab_size={vocab_size}"
        if most := re.search(r"too high.*<= (\d+)", str(error)):
            raise ValueError(f"{asked} is too large for this text; it can be at most {most[1]}") from error
        if least := re.search(r"required_chars.* vs (\d+)", str(error)):
            raise ValueError(f"{asked} is too small for this text; it must be at least {least[1]}") from error
        raise ValueError(f"SentencePiece cannot train on this text: {error}") from error
    return model.getvalue()


def check(model: bytes) -> None:
    """Raises ValueError for bytes without the outer form of a .model file (pieces, then the settings of trainer and
    normalizer), and for what no model needs: millions of pieces, texts that grow, a table that points out of itself.

    SentencePiece itself accepts a file that was cut between two pieces, and would then use default settings. The format has no
    checksum: a flipped bit in a piece or its score is not found out.
    """
    numbers, pieces = set(), 0
    for number, kind, value in _fields(model):
        numbers.add(number)
        if kind != 2:
            raise ValueError(INCOMPLETE)
        if number == PIECES:
            pieces += 1
            if pieces > MOST_PIECES or len(value) > checks.LONGEST_TOKEN:
                raise ValueError(f"it has more than {MOST_PIECES:,} pieces, or one of more than {checks.LONGEST_TOKEN:,} bytes")
        elif number == TRAINER:
            _check_trainer(value)
        elif number in NORMALIZERS:
            _check_normalizer(value)
    if not numbers >= {TRAINER, NORMALIZERS[0]}:
        raise ValueError(INCOMPLETE)


def _check_trainer(settings: bytes) -> None:
    for number, _, value in _fields(settings):
        if number in CONTROL_TEXTS and len(value) > checks.LONGEST_STRING:
            raise ValueError(f"the text of a control piece has {len(value):,} bytes, more than {checks.LONGEST_STRING:,}")


def _check_normalizer(settings: bytes) -> None:
    for number, kind, value in _fields(settings):
        if number == CHARACTER_MAP and kind == 2 and (growth := checks.check_character_map(value)) > checks.LARGEST_GROWTH:
            raise ValueError(
                f"its normalizer turns one character into up to {growth:,.0f}, more than {checks.LARGEST_GROWTH:.0f}"
            )


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Number, wire type and content (of those with a length) of a protobuf message's fields. Raises ValueError where one is cut
    off."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while at < len(message) and shift < 64:
            byte, at = message[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
        raise ValueError(INCOMPLETE)

    while at < len(message):
        tag = varint()
        kind = tag & 7
        size = varint() if kind in (0, 2) else {1: 8, 5: 4}.get(kind, len(message))
        size = 0 if kind == 0 else size
        start, at = at, at + size
        if at > len(message):
            raise ValueError(INCOMPLETE)
        yield tag >> 3, kind, message[start:at] if kind == 2 else b""
