"""How much decoding has compiled."""

from typing import Any

from jaxformer.decode import beam, generate, speculative, stream

PROGRAMS: tuple[Any, ...] = (
    generate._generate,
    speculative.speculate,
    beam._search,
    stream._unstack,
    stream._start,
    stream._block,
)


def compilations() -> int:
    """How many programs decoding has compiled in this process: one for each size of batch, prompt and cache (the sizes are
    few, ``prompts.bucket``), each set of methods of sampling, and each value of the other options (``max_new_tokens``, ``eos``,
    ``num_return``, ...), however many prompts there were."""
    return sum(program._cache_size() for program in PROGRAMS)
