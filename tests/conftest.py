"""Eight simulated devices and one compilation cache for all tests, set before jax is imported; and the three tiers of tests.

``tests/tiers.txt`` lists the slow tests, a shell-style pattern of node ids per line, and the files whose other tests are fast.
"""

import fnmatch
import logging
import os
import re
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


def tiers() -> tuple[list[str], set[str]]:
    """Patterns of the slow tests, and the names of the fast files."""
    slow, fast = [], set()
    for line in (Path(__file__).parent / "tiers.txt").read_text(encoding="utf-8").splitlines():
        tier, _, pattern = line.partition(" ")
        if tier == "slow":
            slow.append(pattern)
        elif tier == "fast":
            fast.add(pattern)
    return slow, fast


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks the tests of each tier. A pattern that matches nothing is an error where all tests are collected, unless its whole
    file is skipped, for want of a package."""
    slow, fast = tiers()
    # "[" and "]" of parametrized tests are no wildcards here.
    unused = {pattern: re.compile(fnmatch.translate(re.sub(r"([\[\]])", r"[\1]", pattern))) for pattern in slow}
    patterns = dict(unused)
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        matching = [pattern for pattern, compiled in patterns.items() if compiled.match(name)]
        for pattern in matching:
            unused.pop(pattern, None)
        if matching:
            item.add_marker("slow")
        elif name.partition("::")[0] in fast and not item.get_closest_marker("slow"):
            item.add_marker("fast")
    collected = {item.nodeid.partition("::")[0].removeprefix("tests/") for item in items}
    here = Path(__file__).parent
    skipped = {str(path.relative_to(here)) for path in here.rglob("test_*.py")} - collected
    unused = [pattern for pattern in unused if pattern.partition("::")[0] not in skipped]
    if unused and config.args == config.getini("testpaths"):
        raise pytest.UsageError(f"tests/tiers.txt: no test matches {', '.join(unused)}")


@pytest.fixture(scope="module", autouse=True)
def programs_are_dropped():
    """After each file: every compiled program holds mappings of memory, of which a process may have some 65,000 only, and the
    compiler does not survive the want of one."""
    yield
    import jax

    jax.clear_caches()
    logging.getLogger("jaxformer").handlers.clear()  # which a run in this process may have left


@pytest.fixture(scope="module")
def quick_compilation():
    """For tests that compile far more than they compute: XLA without optimisation, in half the time."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
