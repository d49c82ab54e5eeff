"""How many programs decoding has compiled."""

from typing import Any

from jaxformer.decode import beam, generate, stream

PROGRAMS: tuple[Any, ...] = (generate._generate, beam._search, stream._unstack, stream._start, stream._block)


def compilations() -> int:
    """How many programs decoding has compiled in this process: one for each size of batch, prompt and cache (the sizes are
    few, ``request.bucket``), each set of sampling methods, and each value of the other options (``max_new_tokens``, ``eos``,
    ``num_return``, ...), however many prompts there were."""
    return sum(program._cache_size() for program in PROGRAMS)
