"""Text from a trained model: ``jaxformer sample RUN "prompt"``.

A prompt is continued, and the text is shown as it is generated. ``--interactive`` asks for one prompt after another; ``--file``
reads one prompt per line, in batches, and writes JSON lines. An encoder–decoder translates its prompts. With ``--chat``, a
model that has a chat template answers.
"""

import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from jaxformer.cli import accelerators, pretrained, program_cache
from jaxformer.cli.launch import opened
from jaxformer.config.strict import Strict, check_seed, to_json, within
from jaxformer.config.textfile import read_text
from jaxformer.decode.beam import beam_search
from jaxformer.decode.programs import compilations
from jaxformer.decode.sampling import Sampling
from jaxformer.decode.stream import stream
from jaxformer.nn import model
from jaxformer.parallel import exit_codes
from jaxformer.tokenizers.disk_cache import target

DEFAULT = Sampling(temperature=0.8)
Prompt = str | list[dict[str, str]]
"""Text; with --chat, also the messages of a conversation, the last of which is the user's."""


@dataclass(frozen=True)
class Options(Strict):
    """What to load, what to continue, and how."""

    run: Annotated[str | Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run directory that train.py wrote, a Hugging Face folder with its tokenizer, or a Hugging Face Hub id."""
    prompt: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PROMPT]")] = None
    """The text to continue, or to translate. Default: read from standard input."""
    interactive: bool = False
    """Ask for one prompt after another until Ctrl-D."""
    file: Path | None = None
    """A file with one prompt per line."""
    chat: bool = False
    """Take a prompt as a user's message, and show only the model's answer. With --interactive each prompt continues the
    conversation; an empty line begins a new one."""
    out: Path | None = None
    """File to write the JSON lines of --file to. Default: standard output. The same command continues one that was
    interrupted, unless the model or an option has changed since."""
    n: int = 1
    """Number of outputs per prompt."""
    max_new_tokens: int = 200
    """Maximum number of tokens in an output."""
    stop: tuple[str, ...] = ()
    """Texts that end an output."""
    batch_size: int = 8
    """Number of prompts of --file that are processed at a time."""
    num_beams: int | None = None
    """Number of hypotheses that beam search keeps; 0: sample instead. Default: 4 for an encoder–decoder, otherwise 0."""
    length_penalty: float = 1.0
    """Exponent of the length that beam search divides scores by; larger values favour longer outputs."""
    seed: int = 0
    """Seed of the random draws, from 0 to 4294967295 (2^32 − 1)."""
    trust: bool = dataclasses.field(default=False, repr=False)
    """Follow the import paths in the config.json of a run with its own components, which runs their code; also accept a
    config.json that has been edited."""
    sampling: Annotated[Sampling, tyro.conf.OmitArgPrefixes] = dataclasses.field(default_factory=lambda: DEFAULT)
    """How the next token is chosen."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 1, math.inf, "n", "max_new_tokens", "batch_size")
        within(self, 0, math.inf, "num_beams")
        check_seed("seed", self.seed)
        if (self.prompt is not None) + self.interactive + (self.file is not None) > 1:
            raise ValueError("give only one of: a prompt, --interactive, --file")
        if self.chat and self.interactive and self.n > 1:
            raise ValueError("a conversation continues from one answer; give --n 1")
        if self.out is not None and self.file is None:
            raise ValueError("--out has no effect without --file")

    def with_files(self) -> "Options":
        """These options with ``~`` expanded in --file and --out. Raises ValueError where one cannot be read or written."""
        file = None if self.file is None else Path(os.path.expanduser(self.file))
        if file is not None and (file.is_dir() or not file.exists()):
            raise ValueError(f"{file} is a folder; --file takes a file" if file.exists() else f"there is no file {file}")
        return dataclasses.replace(self, file=file, out=None if self.out is None else target(self.out))


class Writer:
    """A loaded model that turns prompts into outputs."""

    def __init__(self, options: Options):
        self.cfg, params, self.tok = pretrained.load(options.run, options.trust)
        self.options, self._eos = options, pretrained.ends(options.run, self.tok)
        self._params = jax.jit(model.unstack, static_argnums=1)(params, self.cfg)
        self._beams = (4 if self.cfg.encoder_layers else 0) if options.num_beams is None else options.num_beams
        self.asked = 0
        """Prompts so far: the random draws for the next ones depend on it."""
        if self._beams and (options.sampling != DEFAULT or options.stop):
            raise ValueError("beam search takes neither sampling options nor --stop; give --num-beams 0 to use them")
        if self._beams and options.n > self._beams:
            raise ValueError(f"--n {options.n} is more than --num-beams {self._beams}")

    def pieces(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str, str, int]]:
        """``(row, text, why it ended or "", tokens)`` as they come; row r·n + i is output i of prompt r."""
        options, tok = self.options, self.tok
        ids = [self.encode(prompt) for prompt in prompts]
        arguments: dict[str, Any] = {}
        if self.cfg.encoder_layers:
            width = max(map(len, ids))
            source = np.array([row + [max(tok.pad_id, 0)] * (width - len(row)) for row in ids])
            arguments = {"source": source, "source_valid": np.arange(width) < np.array([len(row) for row in ids])[:, None]}
        starts = None if arguments else ids
        if self._beams:
            yield from self._searched(starts, arguments)
            return
        key = jax.random.fold_in(jax.random.key(options.seed), self.asked)
        self.asked += len(prompts)  # the next prompts draw anew
        arguments |= {"sampling": options.sampling, "key": key, "num_return": options.n}
        arguments |= {"max_new_tokens": options.max_new_tokens, "stop": options.stop, "eos": self._eos}
        for piece in stream(self._params, starts, self.cfg, tok, **arguments):
            yield piece.row, piece.text, piece.finish, len(piece.tokens)

    def outputs(self, prompts: Sequence[Prompt]) -> list[list[dict[str, Any]]]:
        """For each prompt, n complete outputs: text, finish, tokens."""
        outputs = [[{"text": "", "finish": "", "tokens": 0} for _ in range(self.options.n)] for _ in prompts]
        for row, text, finish, tokens in self.pieces(prompts):
            output: dict[str, Any] = outputs[row // self.options.n][row % self.options.n]
            output.update(text=output["text"] + text, finish=finish, tokens=output["tokens"] + tokens)
        return outputs

    def settings(self) -> str:
        """A short hash of everything but the prompt that outputs depend on: the model, wherever it lies, and the options."""
        loaded = to_json(self.cfg), pretrained.digest(self._params), self.tok.content_hash, self._eos
        options = dataclasses.replace(self.options, run="", file=None, out=None)
        return hashlib.sha256(repr((*loaded, options)).encode()).hexdigest()[:12]

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens to continue. Raises ValueError for a prompt that cannot be encoded."""
        if self.options.chat:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return self.tok.encode_chat(messages, add_generation_prompt=True)
        ids = self.tok.encode_prompt(prompt)
        return ids or [next(i for i in (self.tok.bos_id, self.tok.eos_id, self.tok.pad_id, 0) if i >= 0)]

    def _searched(self, ids: list[list[int]] | None, arguments: dict) -> Iterator[tuple[int, str, str, int]]:
        options, tok = self.options, self.tok
        arguments |= {"num_beams": self._beams, "num_return": options.n, "length_penalty": options.length_penalty}
        arguments |= {"max_new_tokens": options.max_new_tokens, "eos": self._eos, "pad": max(tok.pad_id, 0)}
        arguments["banned"] = range(tok.vocab_size, self.cfg.vocab_size)  # the model may have more ids than the tokenizer
        out = beam_search(self._params, ids, self.cfg, **arguments)
        tokens, lengths = np.asarray(out.tokens), np.asarray(out.lengths)
        for row, (line, length) in enumerate(zip(tokens.reshape(-1, tokens.shape[-1]), lengths.reshape(-1), strict=True)):
            ended = line[length - 1] in self._eos
            text = tok.decode(line[: length - ended].tolist())
            yield row, text, "eos" if ended else "length", int(length)


def show(writer: Writer, prompt: Prompt) -> str:
    """Writes the outputs of one prompt to standard output: a single one as it is generated, several one after another. Returns
    the text of a single one."""
    before = "" if writer.cfg.encoder_layers or writer.options.chat else prompt
    if writer.options.n == 1:
        print(before, end="", flush=True)
        pieces = []
        for _, text, _, _ in writer.pieces([prompt]):
            print(text, end="", flush=True)
            pieces.append(text)
        print()
        return "".join(pieces)
    for number, output in enumerate(writer.outputs([prompt])[0], start=1):
        print(f"--- {number} of {writer.options.n} ({output['finish']})")
        print(f"{before}{output['text']}")
    return ""


def ask(writer: Writer) -> None:
    """One prompt after another, until the input ends."""
    said: list[dict[str, str]] = []
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        if writer.options.chat and not prompt:
            said = []
            continue
        asked = [*said, {"role": "user", "content": prompt}]
        try:
            answer = show(writer, asked if writer.options.chat else prompt)
            said = [*asked, {"role": "assistant", "content": answer}]
        except ValueError as error:  # this prompt cannot be encoded; the next may be
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print(" (stopped)")


def write_all(writer: Writer) -> None:
    """Writes JSON lines with prompt and outputs for every prompt of the file, in batches."""
    from rich.console import Console
    from rich.progress import track

    options = writer.options
    assert options.file is not None
    try:
        text = read_text(options.file)
    except UnicodeDecodeError as error:
        raise ValueError(f"{options.file} is not UTF-8 text: {error}") from error
    prompts = text.removesuffix("\n").split("\n")  # no other character ends a line
    if not any(prompts):
        raise ValueError(f"{options.file} is empty: it needs one prompt per line")
    for number, prompt in enumerate(prompts, start=1):
        try:
            writer.encode(prompt)  # a prompt that cannot be encoded is reported now, not after an hour
        except ValueError as error:
            raise ValueError(f"{options.file}, line {number}: {error}") from error
    settings = writer.settings()
    done = _written(options.out, prompts, settings)
    writer.asked = done
    began, tokens = time.perf_counter(), 0
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if done:
        console.print(f"{done} of {len(prompts)} prompts are already in {options.out}")
    # The longest first would need fewer programs; order is worth more: a file that breaks off is a file of the first prompts.
    starts = track(range(done, len(prompts), options.batch_size), "prompts", console=console, transient=True)
    with opened(options.out) as out:
        # A console may lack a character; JSON has another spelling of it.
        as_ascii = (out.encoding or "utf-8").lower().replace("-", "") != "utf8"
        for start in starts:
            batch = prompts[start : start + options.batch_size]
            for prompt, outputs in zip(batch, writer.outputs(batch), strict=True):
                line = {"prompt": prompt, "outputs": outputs, "settings": settings}
                out.write(json.dumps(line, ensure_ascii=as_ascii) + "\n")
                tokens += sum(output["tokens"] for output in outputs)
            out.flush()
    seconds = time.perf_counter() - began
    rate = f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} per second"
    console.print(f"{len(prompts) - done} prompts, {rate}, {compilations()} programs compiled")


def _written(out: Path | None, prompts: list[str], settings: str) -> int:
    """How many of the prompts are in ``out`` already; an incomplete last line is removed. Raises ValueError where ``out`` holds
    anything else."""
    if out is None or not out.is_file():  # what a device or a pipe was given cannot be read again
        return 0
    *lines, rest = out.read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
            prompt, made_with = entry["prompt"], entry["settings"]
        except (ValueError, KeyError, TypeError, RecursionError):
            prompt = made_with = None
        if number >= len(prompts) or prompt != prompts[number]:
            raise ValueError(f"{out}, line {number + 1}, does not belong to the prompts of --file; choose another --out")
        if made_with != settings:
            raise ValueError(f"{out} was begun with another model or other options; use the same ones, or choose another --out")
    if rest:
        begun = b"".join(json.dumps({"prompt": p}, ensure_ascii=False)[:-1].encode() for p in prompts[len(lines) :][:1])
        if not begun or rest[: len(begun)] != begun[: len(rest)]:
            raise ValueError(f"{out} ends with something other than outputs of this command; choose another --out")
        os.truncate(out, out.stat().st_size - len(rest))
    return len(lines)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    options = tyro.cli(
        Options,
        args=arguments,
        prog="jaxformer sample",
        description=exit_codes.below(__doc__),
        config=(tyro.conf.SuppressFixed,),  # a function cannot be given on the command line
    )
    program_cache.enable()
    accelerators.keep_memory()
    if warning := accelerators.missing_extra("jaxformer sample"):
        print(warning, file=sys.stderr)
    writer = Writer(options := options.with_files())
    if options.file is not None:
        write_all(writer)
    elif options.interactive:
        ask(writer)
    else:
        show(writer, sys.stdin.read().removeprefix("\ufeff").rstrip("\n") if options.prompt is None else options.prompt)
