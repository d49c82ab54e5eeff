"""Compiled programs kept on disk: the second start of ``train`` or ``sample`` does not compile again what the first did."""

import hashlib
import os
import platform
import warnings
from pathlib import Path

import filelock
import jax

from jaxformer.tokenizers.disk_cache import folder

LARGEST = 4 * 2**30
"""Bytes of the cache. Where they are not enough, the programs that were not used for the longest time are removed."""
SHORTEST = 0.02
"""Seconds of compilation from which on a program is kept. Many short ones are most of the start of a small model."""
WAIT = 10.0
"""Seconds to wait for other processes that read or write it."""
OFF = "JAX_ENABLE_COMPILATION_CACHE=0 turns it off"


def enable() -> None:
    """Keeps programs in JAX's persistent compilation cache, unless JAX has been given a folder of its own
    (JAX_COMPILATION_CACHE_DIR) or told to keep nothing (JAX_ENABLE_COMPILATION_CACHE=0). To be called before anything is
    compiled. Several processes may share the folder: each reads and writes under its lock."""
    is_chosen = "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.config.values["jax_compilation_cache_dir"]
    if is_chosen or not jax.config.values["jax_enable_compilation_cache"]:
        return
    directory = folder() / "programs" / host()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(directory)
    except (OSError, filelock.Timeout) as error:
        warnings.warn(f"cannot cache compiled programs: {error} (set JAXFORMER_CACHE to another folder; {OFF})", stacklevel=2)
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_compilation_cache_max_size", LARGEST)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST)


def host(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """A short hash of this machine's CPU and its features: a program compiled for one may hold instructions that another does
    not have. Where the system does not list the features, a hash of the machine's name."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    changing = ("processor", "cpu MHz", "bogomips", "BogoMIPS", "apicid", "initial apicid", "core id", "physical id")
    features = {line for line in lines if line.partition(":")[0].strip() not in changing}
    facts = sorted(features) or [platform.node(), platform.processor()]
    return hashlib.sha256("\n".join([platform.machine(), *facts]).encode()).hexdigest()[:16]


def _remove_unfinished(directory: Path) -> None:
    # JAX writes a program, then the time of its last use. A process that was killed in between leaves a program that may be
    # incomplete: it would be reported at every later start, and no other could be removed to make room.
    with filelock.FileLock(directory / ".lockfile", timeout=WAIT):
        for program in directory.glob("*-cache"):
            if not program.with_name(f"{program.name.removesuffix('-cache')}-atime").exists():
                program.unlink()
