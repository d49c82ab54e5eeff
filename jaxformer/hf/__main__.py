"""Commands for published folders: ``python -m jaxformer.hf info|verify|export``. ``--help`` explains each."""

import json
import sys
from pathlib import Path

import tyro

from jaxformer import spec as specs
from jaxformer.hf import files, load, save
from jaxformer.hf.fields import read_json
from jaxformer.hf.load import read_config
from jaxformer.hf.verify import TOLERANCE, compare, read_reference
from jaxformer.nn import model


def info(folder: tyro.conf.Positional[Path]) -> None:
    """What a folder holds, read from its config and headers alone.

    Args:
        folder: A Hugging Face folder.
    """
    values = read_json(folder / "config.json")
    tensors = files.find(folder)
    family, cfg = read_config(values, tensors.entries.keys())
    dtypes = sorted({entry.dtype for entry in tensors.entries.values()})
    print(f"{family.model_type}: {specs.count(model.spec(cfg), cfg):,} parameters in {', '.join(dtypes)}")
    print(cfg)


def verify(
    folders: tyro.conf.Positional[tuple[Path, ...]], tolerance: float = TOLERANCE, markdown: bool = False, legacy: bool = False
) -> None:
    """Loads each folder and compares it, quantity by quantity, with the reference.npz beside it; fails where one is off.

    Args:
        folders: Hugging Face folders, each with a reference.npz (its arrays are described in tests/golden/README.md).
        tolerance: Largest difference, relative to the largest value of the reference.
        markdown: One line a folder, as a table, instead of one a quantity.
        legacy: Read config_legacy.json in place of config.json.
    """
    failed = False
    if markdown:
        print(f"| folder | {' | '.join(GROUPS)} |\n|{'---|' * (len(GROUPS) + 1)}")
    for folder in folders:
        values = read_json(folder / ("config_legacy.json" if legacy else "config.json"))
        cfg, params = load(folder, config=values)
        eos, pad = values.get("eos_token_id"), values.get("pad_token_id") or 0
        rows = list(compare(cfg, params, values["model_type"], read_reference(folder / "reference.npz"), eos, pad))
        off = [row for row in rows if not row.relative <= tolerance]
        failed = failed or bool(off)
        if markdown:
            _line(folder.name, rows)
            continue
        print(f"{folder}")
        for row in rows:
            mark = "" if row.relative <= tolerance else "   <- past the tolerance"
            print(f"  {row.quantity:32} {row.absolute:10.2e} of {row.scale:10.3e}: {row.relative:.1e}{mark}")
        print(f"  {'first past ' + format(tolerance, 'g'):32} {off[0].quantity if off else 'none'}")
    if failed:
        sys.exit(1)


GROUPS = {
    "unpadded": ", unpadded",
    "padded": ", padded",
    "hidden states": "coder ",
    "loss": "loss",
    "gradients": "gradient",
    "greedy": "greedy",
    "beams": "beam",
}
"""Column -> what its quantities have in their names."""


def _line(name: str, rows: list) -> None:
    cells = []
    for part in GROUPS.values():
        found = [row.relative for row in rows if part in row.quantity]
        cells.append(f"{max(found):.0e}" if found else "")
    print(f"| {name} | " + " | ".join(cells) + " |")


def export(run: tyro.conf.Positional[Path], folder: tyro.conf.Positional[Path], family: str | None = None) -> None:
    """Writes a run of train.py as a folder that transformers reads.

    Args:
        run: Directory that train.py wrote.
        folder: Where to; it must not hold weights yet.
        family: The model_type to write, where several fit.
    """
    from jaxformer.run import load as load_run

    cfg, params, tok = load_run(run)
    save(folder, cfg, params, family)
    tok.save(folder)
    print(f"{folder}: {json.loads((folder / 'config.json').read_text())['model_type']}, with its {tok.file}")


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"info": info, "verify": verify, "export": export}, prog="python -m jaxformer.hf", description=__doc__
        )
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
