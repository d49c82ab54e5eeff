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
    """Where one of our tensors is: the file's name ({i} for the layer), its layout, and which of several parts it is."""

    name: str
    layout: str
    part: int = 0

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """Of the file's tensor."""
        return tuple(sum(count(letters, sizes) for letters in parts) for parts in axes(self.layout))

    def take(self, tensor: np.ndarray, dims: str, sizes: dict[str, int]) -> np.ndarray:
        """Our tensor, of axes ``dims``, out of the file's: a view where one is possible."""
        tensor, letters = self._part(tensor, sizes)
        tensor = tensor.transpose([letters.index(letter) for letter in dims if letter in letters])
        return tensor.reshape([sizes[letter] for letter in dims])  # letters of size 1 may be missing from the file

    def put(self, tensor: np.ndarray, ours: np.ndarray, dims: str, sizes: dict[str, int]) -> None:
        """Writes our tensor to its place in the file's, which ``shape`` has."""
        part, letters = self._part(tensor, sizes)
        ours = ours.reshape([sizes[letter] for letter in dims if letter in letters])
        part[...] = ours.transpose(_inverse([letters.index(letter) for letter in dims if letter in letters]))

    def _part(self, tensor: np.ndarray, sizes: dict[str, int]) -> tuple[np.ndarray, str]:
        """A view of the part, one axis a letter."""
        letters, split = "", []
        at: list[slice | int] = []
        for parts in axes(self.layout):
            own = parts[self.part] if len(parts) > 1 else parts[0]
            start = sum(count(before, sizes) for before in parts[: self.part]) if len(parts) > 1 else 0
            at.append(slice(start, start + count(own, sizes)))
            letters += own
            split += [_size(letter, sizes) for letter in own]
        view = np.reshape(tensor[tuple(at)], split, copy=False)  # put writes to it: a copy would be an error
        for letter in re.findall(r"\d", letters):
            view = view[(slice(None),) * letters.index(letter) + (self.part if _size(letter, sizes) > 1 else 0,)]
            letters = letters.replace(letter, "", 1)
        return view, letters


def axes(layout: str) -> list[list[str]]:
    """For each axis, the letters of the parts it is a concatenation of."""
    found = re.findall(r"\(([A-Z0-9]+)\)|\[([A-Z0-9|]+)\]|([A-Z0-9])", layout)
    return [joined.split("|") if joined else [merged or single] for merged, joined, single in found]


def count(letters: str, sizes: dict[str, int]) -> int:
    """Product of the sizes."""
    return math.prod(_size(letter, sizes) for letter in letters)


def _size(letter: str, sizes: dict[str, int]) -> int:
    return int(letter) if letter.isdigit() else sizes[letter]


def _inverse(order: list[int]) -> list[int]:
    return [order.index(number) for number in range(len(order))]
