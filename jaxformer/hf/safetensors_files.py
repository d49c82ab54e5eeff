"""The tensors of a folder's safetensors files, by name: the headers say what is there, and a tensor is read when it is asked
for. The older flax_model.msgpack is read under the same names.

Neither format has a checksum. Names, shapes, dtypes and offsets that do not fit each other or the file are refused; a flipped
bit in the numbers themselves is not found out.
"""

import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from jaxformer.config.textfile import read_bytes, require_regular
from jaxformer.tokenizers.json_files import parse, read_json

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
LONGEST_HEADER = 16_000_000  # bytes, of some 150,000 tensors; the format's own limit takes gigabytes of memory
MOST_TENSORS = 200_000  # in a file
MOST_AXES = 64
LONGEST_NAME = 1024  # bytes of a key in flax_model.msgpack
INDEX = "model.safetensors.index.json"


class Entry(NamedTuple):
    """A tensor that has not been read. Its bytes in the file are those from ``start`` to ``stop``."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int = 0
    stop: int = 0


class Tensors(Protocol):
    """The tensors of a folder."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All tensors, by name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor of that name."""
        ...


class Safetensors:
    """One file, or the shards that an index names."""

    def __init__(self, folder: Path):
        index, single = folder / INDEX, folder / "model.safetensors"
        if index.exists() and single.exists():
            raise ValueError(f"{folder} has both model.safetensors and {INDEX}, so it is not clear which to read; remove one")
        if index.exists():
            self.entries = self._sharded(folder, index)
            return
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
        if len(files) > 1:
            raise ValueError(f"{folder} has {len(files)} safetensors files and no {INDEX}")
        self.entries = _header(files[0])

    def _sharded(self, folder: Path, index: Path) -> dict[str, Entry]:
        file_of = read_json(index).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise ValueError(f"{index} has no weight_map")
        outside = sorted({str(file) for file in file_of.values() if not isinstance(file, str) or Path(file).name != file})
        if outside:
            raise ValueError(f"{index} names files outside its folder: {', '.join(outside)}")
        files = sorted(set(file_of.values()))
        if missing := [file for file in files if not os.path.isfile(folder / file)]:
            raise ValueError(f"{index} names files that do not exist: {', '.join(missing)}")
        entries: dict[str, Entry] = {}
        for file in files:
            for name, entry in _header(folder / file).items():
                if name in entries:
                    raise ValueError(f"{name} is in {entries[name].file.name} and in {file} of {folder}")
                entries[name] = entry
        wrong = [name for name, file in file_of.items() if name not in entries or entries[name].file.name != file]
        extra = sorted(entries.keys() - file_of.keys())
        if wrong or extra:
            lines = [f"  missing     {name}  in {file_of[name]}" for name in sorted(wrong)]
            lines += [f"  unexpected  {name}  in {entries[name].file.name}" for name in extra]
            raise ValueError(f"{index} and its files differ:\n" + "\n".join(lines))
        return entries

    def read(self, name: str) -> np.ndarray:
        """The tensor of that name: the bytes of the file, mapped for as long as the array lives, and read-only."""
        entry = self.entries[name]
        before = entry.start % mmap.ALLOCATIONGRANULARITY
        dtype = jnp.dtype(entry.dtype)
        if entry.start == entry.stop:
            return np.zeros(entry.shape, dtype)
        with entry.file.open("rb") as file:
            length = entry.stop - entry.start + before
            mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=entry.start - before)
        return np.frombuffer(mapped, dtype, offset=before).reshape(entry.shape)


def release(array: np.ndarray) -> None:
    """Releases the memory of a mapped tensor's pages; they are read again when they are needed again."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


def _header(path: Path) -> dict[str, Entry]:
    """The entries of a safetensors file's header. Raises ValueError that names the file, before anything large is allocated."""
    from safetensors import SafetensorError, safe_open

    require_regular(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise ValueError(f"it has only {size} bytes, too few for a header")
            (length,) = struct.unpack("<Q", start)
            if length > size - 8:
                raise ValueError(f"its header says it is {length} bytes long; the file has {size}")
            if length > LONGEST_HEADER:
                raise ValueError(f"its header has {length:,} bytes, more than the {LONGEST_HEADER:,} that are allowed")
            header = parse(file.read(length))
        if not isinstance(header, dict) or len(header) > MOST_TENSORS:
            raise ValueError(f"its header is not an object of at most {MOST_TENSORS:,} tensors")
        with safe_open(path, "np"):  # it checks that the offsets are in order, and that the file is as long as they say
            header.pop("__metadata__", None)
        data = 8 + length
        entries = {
            name: Entry(tuple(h["shape"]), DTYPES.get(h["dtype"], h["dtype"]), path, *(data + at for at in h["data_offsets"]))
            for name, h in header.items()
        }
    except (ValueError, OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
    return entries


class Msgpack:
    """flax_model.msgpack of the classes that transformers 5 removed, under the names of the others' files."""

    def __init__(self, path: Path):
        from flax.serialization import msgpack_restore
        from flax.traverse_util import flatten_dict

        data = read_bytes(path)
        try:
            _check_msgpack(data)
            tree = msgpack_restore(data)
        except Exception as error:  # msgpack raises many kinds for bytes that are not its own
            raise ValueError(f"{path} is not a complete msgpack file: {error}") from error
        flat = flatten_dict(tree.get("params", tree)) if isinstance(tree, dict) else {}
        if not flat:
            raise ValueError(f"{path} holds no parameters")
        if strange := [".".join(map(str, keys)) for keys, value in flat.items() if not isinstance(value, np.ndarray)]:
            raise ValueError(f"{path}: {strange[0]} is not an array")
        named = [_torch_name(keys, value) for keys, value in flat.items()]
        self._tensors = dict(named)
        if len(self._tensors) < len(named):
            raise ValueError(f"{path} holds two arrays of the same name")
        self.entries = {name: Entry(t.shape, t.dtype.name, path) for name, t in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor of that name."""
        return self._tensors[name]


def _check_msgpack(data: bytes) -> None:
    """Raises ValueError for what the state of a model does not hold: keys that occur twice, and more maps, keys and lists than
    ``MOST_TENSORS``, each of which would take a hundred times its bytes."""
    import msgpack

    count = 0

    def add(items: list) -> None:
        nonlocal count
        count += 1 + len(items)
        if count > MOST_TENSORS:
            raise ValueError(f"it has more than {MOST_TENSORS:,} parts")

    def pairs(items: list[tuple[Any, Any]]) -> None:
        add(items)
        if len({key for key, _ in items}) < len(items):
            raise ValueError("one of its keys occurs twice")

    def array(code: int, content: bytes) -> None:
        msgpack.unpackb(content, list_hook=add, raw=True, max_array_len=MOST_AXES, max_map_len=0, max_ext_len=0)

    limits = {"max_array_len": MOST_AXES, "max_map_len": MOST_TENSORS, "max_str_len": LONGEST_NAME, "max_bin_len": LONGEST_NAME}
    msgpack.unpackb(data, object_pairs_hook=pairs, list_hook=add, ext_hook=array, raw=False, **limits)


def _torch_name(keys: tuple, value: np.ndarray) -> tuple[str, np.ndarray]:
    """A Flax path as the name, and the layout, of a safetensors file."""
    *path, last = (str(key) for key in keys)
    if last == "kernel":
        return ".".join((*path, "weight")), value.T
    return ".".join((*path, {"embedding": "weight", "scale": "weight"}.get(last, last))), value


def find(folder: Path) -> Tensors:
    """The tensors of a folder. Raises FileNotFoundError or ValueError where there are none, or broken ones."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    if (folder / INDEX).exists() or any(folder.glob("*.safetensors")):
        return Safetensors(folder)
    if (folder / "flax_model.msgpack").exists():
        return Msgpack(folder / "flax_model.msgpack")
    if shards := sorted(folder.glob("flax_model-*.msgpack")):
        raise FileNotFoundError(
            f"{folder} has its flax_model.msgpack in {len(shards)} parts, which cannot be read; save it as one file"
        )
    pickles = [p.name for p in folder.glob("*.bin")] + [p.name for p in folder.glob("*.pt*")]
    hint = f"; {', '.join(pickles)} may run any code and is not read: convert it to safetensors" if pickles else ""
    raise FileNotFoundError(f"{folder} has neither model.safetensors nor {INDEX} nor flax_model.msgpack{hint}")
