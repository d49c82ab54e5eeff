"""Eight simulated devices and one compilation cache for all tests. Set before jax is imported."""

import os
import tempfile
from pathlib import Path

import pytest

CACHE = Path(tempfile.gettempdir()) / f"jaxformer-tests-{os.getuid()}"
DEVICES = "--xla_force_host_platform_device_count=8"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAXFORMER_CACHE", str(CACHE / "data"))


@pytest.fixture(scope="module", autouse=True)
def programs_are_dropped():
    """After each file: every compiled program holds mappings of memory, of which a process may have some 65,000 only, and the
    compiler does not survive the want of one."""
    yield
    import jax

    jax.clear_caches()


@pytest.fixture(scope="module")
def quick_compilation():
    """For tests that compile far more than they compute: XLA without optimisation, in half the time."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
