"""How a published file stores a tensor, in the letters of the dimension key, axis by axis:

    "(KGH)D"          one axis that holds heads and their width, then the model width
    "D[KGH|KH|KH]"    queries, keys and values side by side
    "(K3H)D"          for each head in turn its query, key and value
    "[2|P]D"          two rows that are not ours, then a table

``Source`` says which tensor of a file, so laid out, holds one of ours.
"""

import math
import re
from typing import NamedTuple

import numpy as np


class Source(NamedTuple):
    """Where a file has one of our tensors: its name there ({i} stands for the layer, {e} for the expert), its layout, and the
    number of ours among those that are stored side by side."""

    name: str
    layout: str
    number: int = 0

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The shape of the file's tensor."""
        return tuple(sum(count(letters, sizes) for letters in slices) for slices in axes(self.layout))

    def take(self, tensor: np.ndarray, dims: str, sizes: dict[str, int]) -> np.ndarray:
        """Our tensor, with axes ``dims``, out of the file's: a view where one is possible."""
        tensor, letters = self._view(tensor, sizes)
        tensor = tensor.transpose([letters.index(letter) for letter in dims if letter in letters])
        return tensor.reshape([sizes[letter] for letter in dims])  # letters of size 1 may be missing from the file

    def put(self, tensor: np.ndarray, ours: np.ndarray, dims: str, sizes: dict[str, int]) -> None:
        """Writes our tensor to its place in the file's, which has the shape ``shape``."""
        view, letters = self._view(tensor, sizes)
        ours = ours.reshape([sizes[letter] for letter in dims if letter in letters])
        view[...] = ours.transpose(np.argsort([letters.index(letter) for letter in dims if letter in letters]))

    def _view(self, tensor: np.ndarray, sizes: dict[str, int]) -> tuple[np.ndarray, str]:
        """A view of what is ours in the file's tensor, with an axis for each letter; and the letters."""
        letters, index = "", list[slice]()
        for slices in axes(self.layout):
            chosen = self.number if len(slices) > 1 else 0
            start = sum(count(before, sizes) for before in slices[:chosen])
            index.append(slice(start, start + count(slices[chosen], sizes)))
            letters += slices[chosen]
        shape = [_size(letter, sizes) for letter in letters]
        view = np.reshape(tensor[tuple(index)], shape, copy=False)  # put writes to it: a copy would be an error
        for letter in re.findall(r"\d", letters):
            view = view[(slice(None),) * letters.index(letter) + (self.number if _size(letter, sizes) > 1 else 0,)]
            letters = letters.replace(letter, "", 1)
        return view, letters


def axes(layout: str) -> list[list[str]]:
    """For each axis, the letters of the slices that it is a concatenation of."""
    matches = re.findall(r"\(([A-Z0-9]+)\)|\[([A-Z0-9|]+)\]|([A-Z0-9])", layout)
    return [concatenated.split("|") if concatenated else [merged or single] for merged, concatenated, single in matches]


def count(letters: str, sizes: dict[str, int]) -> int:
    """The product of the letters' sizes."""
    return math.prod(_size(letter, sizes) for letter in letters)


def _size(letter: str, sizes: dict[str, int]) -> int:
    return int(letter) if letter.isdigit() else sizes[letter]


Table = dict[str, Source]
"""Path of one of our parameters -> where a file has it."""


def linear(path: str, name: str, outputs: str, inputs: str) -> Table:
    """A linear map that is stored as (outputs, inputs), and its bias."""
    return {path: Source(f"{name}.weight", outputs + inputs), f"{path}_bias": Source(f"{name}.bias", outputs)}


def gated(path: str, name: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Table:
    """The three linear maps of a gated feed-forward."""
    return (
        linear(f"{path}.gate", f"{name}.{gate}", "F", "D")
        | linear(f"{path}.up", f"{name}.{up}", "F", "D")
        | linear(f"{path}.down", f"{name}.{down}", "D", "F")
    )


def normed(path: str, name: str, dims: str = "D") -> Table:
    """The gain and the bias of a norm."""
    return {f"{path}.gain": Source(f"{name}.weight", dims), f"{path}.bias": Source(f"{name}.bias", dims)}


def attention(path: str, name: str, q: str = "q_proj", k: str = "k_proj", v: str = "v_proj", o: str = "o_proj") -> Table:
    """Four separate projections."""
    return (
        linear(f"{path}.query", f"{name}.{q}", "(KGH)", "D")
        | linear(f"{path}.key", f"{name}.{k}", "(KH)", "D")
        | linear(f"{path}.value", f"{name}.{v}", "(KH)", "D")
        | linear(f"{path}.out", f"{name}.{o}", "D", "(KGH)")
    )


def joined(paths: tuple[str, ...], name: str, layout: str) -> Table:
    """Several of our tensors that a file stores as one."""
    return {path: Source(name, layout, number) for number, path in enumerate(paths)}


def layers(stack: str, name: str, table: Table) -> Table:
    """The table of a stack, made of the table of one layer."""
    return {f"{stack}.layers.{path}": source._replace(name=f"{name}.{{i}}.{source.name}") for path, source in table.items()}
