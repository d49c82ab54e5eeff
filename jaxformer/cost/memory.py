"""Whether a run can fit into the memory that there is, by arithmetic alone: what certainly cannot is refused at once."""

import functools
import math
import os
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxformer.config import spec as specs
from jaxformer.cost.device import device_bytes, spread
from jaxformer.cost.programs import batch_of
from jaxformer.cost.topology import GIB
from jaxformer.data.config import TASKS
from jaxformer.nn import model
from jaxformer.parallel.placement import state_shardings
from jaxformer.parallel.sharding import MeshConfig
from jaxformer.training import run
from jaxformer.training.config import NEXT_TOKEN
from jaxformer.training.update import param_shardings

CGROUPS = Path("/sys/fs/cgroup")


def check(config: run.Config, mesh: Mesh) -> None:
    """Raises ValueError for a run that needs more than the memory of a device (on CPUs, of this machine) for its parameters,
    optimizer state, batch and, on CPUs, the attention scores of one layer alone. What else it needs is not counted, and nothing
    is refused where the memory is not known."""
    needs = needed(config, mesh)
    device = mesh.local_devices[0]
    on_cpu = device.platform == "cpu"
    has = host_bytes() if on_cpu else (device.memory_stats() or {}).get("bytes_limit")
    if has is None or sum(needs.values()) <= has:
        return
    sizes = ", ".join(f"{kind} {size / GIB:,.1f} GiB" for kind, size in needs.items())
    where = "this machine has" if on_cpu else f"each {device.device_kind} has"
    lower = "data.length or data.batch_size, or raise train.microbatches"
    if needs["batch"] + needs["attention scores"] < max(needs["parameters"], needs["optimizer state"]):
        cfg = config.model
        path, param = max(specs.walk(model.spec(cfg)), key=lambda item: math.prod(item[1].shape(cfg)))
        largest = f"{path}, of shape {list(param.shape(cfg))}"
        spread_it = "" if on_cpu else ", or spread it over more devices with mesh.fsdp"
        lower = f"the sizes of the model, whose largest parameter is {largest}{spread_it}"
    more = "gradients and other activations not counted"
    raise ValueError(f"this run cannot fit into memory: {sizes} ({more}), and {where} {has / GIB:,.1f} GiB; lower {lower}")


def needed(config: run.Config, mesh: Mesh) -> dict[str, int]:
    """Bytes by kind that a device must hold at least; of CPUs, which share the memory, all of a process."""
    cfg = config.model
    state = jax.eval_shape(functools.partial(run.initial_state, config), specs.abstract(model.spec(cfg), cfg))
    total = {"parameters": device_bytes(state.params), "optimizer state": device_bytes(state.opt_state), "batch": 0}
    scores = 0
    if config.data.task in TASKS and config.train.objective == NEXT_TOKEN:
        total["batch"] = device_bytes(batch_of(config))
        scores = _scores(config) // jax.process_count() if _shares_memory(mesh) else 0
    total["attention scores"] = scores
    if config.mesh == MeshConfig():  # every device has all of the state
        return total | {"batch": total["batch"] // (jax.process_count() if _shares_memory(mesh) else mesh.size)}
    where = state_shardings(state, param_shardings(cfg, mesh))
    shared = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, where)
    on_each = {
        "parameters": device_bytes(spread(model.spec(cfg), cfg, mesh)),
        "optimizer state": 0 if config.mesh.offload else device_bytes(shared.opt_state),
        "batch": total["batch"] // mesh.size,
        "attention scores": scores,
    }
    if not _shares_memory(mesh):
        return on_each
    shared_by = {kind: size // jax.process_count() for kind, size in total.items()} | {"attention scores": scores}
    return {kind: max(size, shared_by[kind]) for kind, size in on_each.items()}


def _scores(config: run.Config) -> int:
    """Bytes of the scores of one microbatch in one layer of built-in attention, [B, K, G, T, T] in float32, which CPUs hold at
    once; 0 where another component decides."""
    rows = config.data.batch_size // config.train.microbatches
    is_built_in = all(layer.attention in ("grouped", "latent") for layer in config.model.layers)
    return 4 * rows * config.model.n_heads * config.data.length**2 if is_built_in else 0


def _shares_memory(mesh: Mesh) -> bool:
    return mesh.local_devices[0].platform == "cpu"


def host_bytes() -> int | None:
    """Memory that this process may have, with swap: the machine's, or less where its control group sets a limit."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    except (OSError, ValueError, IndexError):
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, AttributeError):
            return None
    swap = 1024 * kilobytes.get("SwapTotal", 0)
    installed = 1024 * kilobytes["MemTotal"] if "MemTotal" in kilobytes else None
    limits = [limit for limit in (installed, _group_limit()) if limit is not None]
    return min(limits) + swap if limits else None


def _group_limit() -> int | None:
    """The least limit of the control groups that this process is in (cgroup v2, then v1)."""
    try:
        entries = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    groups = [Path(path.lstrip("/")) for number, _, path in (entry.split(":", 2) for entry in entries) if number == "0"]
    files = [CGROUPS / folder / "memory.max" for group in groups for folder in (group, *group.parents)]
    limits = []
    for file in (*files, CGROUPS / "memory" / "memory.limit_in_bytes"):
        try:
            limits.append(int(file.read_text(encoding="ascii")))
        except (OSError, ValueError):  # none, or "max"
            continue
    return min(limits, default=None)
