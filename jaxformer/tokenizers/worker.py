"""The program of the process that ``limited`` starts: it runs what other people's files say, within limits of its own.

It reads requests from its input and writes an answer to each, until its input ends. It is run by its path and imports nothing
of this package, so that it starts in a tenth of a second. A request that takes more than its limits ends the process.
"""

import functools
import json
import pickle
import struct
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO

DONE, FAILED = b"d", b"f"
LONGEST_TEXT = 32_000_000
"""Characters of what a template may write."""
MOST_IDS = 256
"""Ids per byte of text that a tokenizer may make."""


def render(template: str, values: dict[str, Any]) -> str:
    """The text that a chat template makes of ``values``. Raises ValueError where the template fails or calls
    raise_exception."""
    compiled = _compiled(template)
    try:
        text = compiled.render(values)
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything; this conversation then has no text
        raise ValueError(f"the chat template failed: {error}") from error
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"the chat template wrote {len(text):,} characters; at most {LONGEST_TEXT:,} are allowed")
    return text


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    environment = _environment()
    try:
        return environment.from_string(template)
    except MemoryError:
        raise
    except Exception as error:  # jinja2's errors, and those of its constant folding
        raise ValueError(f"the chat template cannot be parsed: {error}") from error


@functools.cache
def _environment() -> Any:
    import jinja2
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """``{% generation %}`` marks what the model writes; for the text it is not there."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj, attribute):
            if attribute.startswith("_"):  # Jinja would print nothing for it
                raise jinja2.exceptions.SecurityError(f"access to attribute {attribute!r} is not allowed")
            return super().unsafe_undefined(obj, attribute)

    def refuse(message):
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # Jinja's filter of this name escapes for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def check_tokenizer(data: bytes) -> str:
    """Reads a tokenizer.json, and encodes and decodes probes with it. Raises ValueError where it cannot be read, or where the
    tokenizers library crashes on it."""
    import tokenizers

    try:
        tok: Any = tokenizers.Tokenizer.from_buffer(data)
    except MemoryError:
        raise
    except Exception as error:  # tokenizers passes on the errors of its parsers
        raise ValueError(f"it is not a complete Hugging Face tokenizer: {error}") from error
    tok.no_truncation()
    tok.no_padding()
    for text in _probes():
        try:
            ids = tok.encode(text, add_special_tokens=True).ids
        except MemoryError:
            raise
        except Exception:  # an ordinary vocabulary may have no ids for this text
            continue
        _check_count(text, ids)
        tok.decode(ids, skip_special_tokens=False)
    return ""


def check_sentencepiece(data: bytes) -> str:
    """Does the same with a SentencePiece .model."""
    import sentencepiece

    try:
        model: Any = sentencepiece.SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise ValueError(f"it is not a SentencePiece model: {error}") from error
    for text in _probes():
        ids = model.encode(text)
        _check_count(text, ids)
        model.decode(ids)
    return ""


def _probes() -> list[str]:
    """Texts in which a slow rule shows: words, code, long runs of each character, and all characters of many scripts."""
    characters = "".join(map(chr, (*range(0x2600), *range(0x3000, 0x3400), *range(0xFB00, 0xFE00), *range(0x1F600, 0x1F650))))
    words = "The quick brown fox doesn't jump over 12345 lazy dogs.\r\n\n\tdef f(x):\n        return x  # naïve café 日本語 ✓\n"
    runs = [character * 60 + "!" for character in map(chr, range(32, 127))]
    return ["", "a", words * 20, characters, *runs, "a" * 5_000, " " * 5_000, "ab" * 2_000 + "\n" * 1_000]


def _check_count(text: str, ids: list[int]) -> None:
    most = MOST_IDS * (len(text.encode()) + 1)
    if len(ids) > most:
        raise ValueError(f"it makes {len(ids):,} ids of a text of {len(text):,} characters, more than any real tokenizer")


FUNCTIONS: dict[str, Callable[..., str]] = {f.__name__: f for f in (render, check_tokenizer, check_sentencepiece)}


def limit(seconds: float, size: int) -> None:
    """Lets the process take ``seconds`` of computing from now on (0: any number) and ``size`` bytes of memory. Systems without
    such limits have none: there the time that the other process waits is the only one."""
    try:
        import resource
        import signal

        signal.setitimer(signal.ITIMER_PROF, seconds)
        if size:
            resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (ImportError, AttributeError, ValueError, OSError):
        pass


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers requests until there are no more."""
    while header := requests.read(8):
        name, arguments, seconds, size = pickle.loads(requests.read(*struct.unpack("<Q", header)))
        limit(seconds, size)
        try:
            data = DONE + FUNCTIONS[name](*arguments).encode("utf-8", "surrogatepass")
        except MemoryError:
            sys.exit(NO_ROOM)  # the process may be in any state after that
        except ValueError as error:
            data = FAILED + str(error).encode("utf-8", "surrogatepass")
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # a panic in Rust is raised as a BaseException of this name
                raise
            data = FAILED + f"the tokenizers library crashed: {error}".encode("utf-8", "surrogatepass")
        limit(0, 0)
        answers.write(struct.pack("<Q", len(data)) + data)
        answers.flush()


NO_ROOM = 77
"""Exit status where there is no more memory."""

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    serve(sys.stdin.buffer, sys.stdout.buffer)
