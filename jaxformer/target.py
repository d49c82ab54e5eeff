"""The platform that programs are made for: the one they are traced on, unless a planner compiles for another."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

_target: ContextVar[str | None] = ContextVar("target", default=None)


def platform() -> str:
    """ "cpu", "gpu" or "tpu"."""
    named = _target.get() or jax.default_backend()
    return "gpu" if named in ("cuda", "rocm") else named


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """What is traced inside is meant for ``platform``. What ``jit`` has traced before keeps what it was traced for."""
    token = _target.set(platform)
    try:
        yield
    finally:
        _target.reset(token)
