"""Whether a program will run on CPUs, and whether an accelerator of the machine is left unused for want of an extra."""

import shutil
from pathlib import Path

import jax

from jaxformer.parallel import host_memory

_TPU_VENDOR = "0x1ae0"


def visible(root: Path = Path("/"), path: str | None = None) -> str | None:
    """The extra for the accelerator that the machine below ``root`` shows: "cuda", "tpu" or None.

    ``path`` is searched for nvidia-smi; by default that is the environment's PATH.
    """
    nvidia = (root / "proc/driver/nvidia/version", root / "dev/nvidia0")
    if any(file.exists() for file in nvidia) or shutil.which("nvidia-smi", path=path):
        return "cuda"
    if (root / "dev/accel0").exists():
        return "tpu"
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    if (root / "dev/vfio/0").exists() and any(file.read_text().strip() == _TPU_VENDOR for file in vendors):
        return "tpu"
    return None


def keep_memory() -> bool:
    """``host_memory.keep_memory`` where JAX will run on CPUs, by what it has been told or else by what the machine has. To be
    called before JAX computes anything. Gives whether the process keeps its memory."""
    platforms = jax.config.values["jax_platforms"]
    is_cpu = platforms.split(",")[0] == "cpu" if platforms else visible() is None
    return is_cpu and host_memory.keep_memory()


def missing_extra(program: str) -> str | None:
    """What to install if JAX runs on the CPU of a machine with an accelerator and nobody asked for that."""
    if jax.default_backend() != "cpu" or "cpu" in (jax.config.values["jax_platforms"] or ""):
        return None
    extra = visible()
    if extra is None:
        return None
    name = {"cuda": "an NVIDIA GPU", "tpu": "a TPU"}[extra]
    command = f"uv run --extra {extra} {program} …"
    return f"This machine has {name}, but JAX runs on the CPU: install the extra `{extra}` ({command})."
