"""Commands for published folders: ``python -m jaxformer.hf info|import|export|verify``. ``--help`` explains each."""

import json
import sys
from pathlib import Path

import jax
import tyro

from jaxformer.config import spec as specs
from jaxformer.hf import files, load, save
from jaxformer.hf.fields import read_json
from jaxformer.hf.hub import carry, locate
from jaxformer.hf.load import prepare, read_config
from jaxformer.hf.verify import TOLERANCE, compare, read_reference
from jaxformer.nn import model


def info(source: tyro.conf.Positional[str], revision: str | None = None) -> None:
    """What a folder holds, read from its config and headers alone.

    Args:
        source: A Hugging Face folder, or a hub's id.
        revision: Branch, tag or commit of a hub's id.
    """
    folder = locate(source, revision)
    values = read_json(folder / "config.json")
    tensors = files.find(folder)
    family, cfg = read_config(values, tensors.entries.keys())
    dtypes = sorted({entry.dtype for entry in tensors.entries.values()})
    print(f"{family.model_type}: {specs.count(model.spec(cfg), cfg):,} parameters in {', '.join(dtypes)}")
    print(cfg)


def verify(folders: tyro.conf.Positional[tuple[Path, ...]], tolerance: float = TOLERANCE, markdown: bool = False) -> None:
    """Loads each folder and compares it, quantity by quantity and layer by layer, with a reference; fails where one is off.

    The reference is the reference.npz in the folder, or what transformers itself, if installed, makes of drawn inputs. Both
    compute in float32. A config_legacy.json beside config.json must describe the same model.

    Args:
        folders: Hugging Face folders. tests/golden/README.md describes the arrays of a reference.npz.
        tolerance: Largest difference, relative to the largest absolute value of the reference.
        markdown: One line a folder, as a table, instead of one a quantity.
    """
    failed = False
    if markdown:
        print(f"| folder | {' | '.join(GROUPS)} | older config |\n|{'---|' * (len(GROUPS) + 2)}")
    for folder in folders:
        values = read_json(folder / "config.json")
        cfg, params = load(folder, "float32")
        legacy = folder / "config_legacy.json"
        same = prepare(folder, "float32", config=read_json(legacy))[0] == cfg if legacy.exists() else None
        reference, source = _reference(folder)
        eos, pad = values.get("eos_token_id"), values.get("pad_token_id") or 0
        rows = list(compare(cfg, params, values["model_type"], reference, eos, pad))
        if not rows:
            raise ValueError(f"{source} of {folder} holds no array by a name that is compared (see tests/golden/README.md)")
        off = [row for row in rows if not row.relative <= tolerance]
        failed = failed or bool(off) or same is False
        if markdown:
            _line(folder.name, rows, same)
            continue
        print(f"{folder}, against {source}")
        for row in rows:
            mark = "" if row.relative <= tolerance else "   <- past the tolerance"
            print(f"  {row.quantity:32} {row.absolute:10.2e} of {row.scale:10.3e}: {row.relative:.1e}{mark}")
        if same is not None:
            print(f"  {legacy.name:32} {'the same model' if same else 'ANOTHER model'}")
        print(f"  {'first past ' + format(tolerance, 'g'):32} {off[0].quantity if off else 'none'}")
    if failed:
        sys.exit(1)


def _reference(folder: Path) -> tuple[dict, str]:
    path = folder / "reference.npz"
    if path.exists():
        return read_reference(path), path.name
    try:
        from jaxformer.hf import peer
    except ImportError as error:
        raise FileNotFoundError(f"{folder} has no reference.npz; without one, install torch and transformers") from error
    return peer.reference(folder), f"transformers {peer.transformers.__version__}"


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


def _line(name: str, rows: list, same: bool | None) -> None:
    cells = []
    for part in GROUPS.values():
        found = [row.relative for row in rows if part in row.quantity]
        cells.append(f"{max(found):.0e}" if found else "")
    cells.append({None: "", True: "same", False: "differs"}[same])
    print(f"| {name} | " + " | ".join(cells) + " |")


def import_(source: tyro.conf.Positional[str], run: tyro.conf.Positional[Path], revision: str | None = None) -> None:
    """Writes a published model as a run directory, which jaxformer.load, the sampling program and train.py --init.from take.

    Args:
        source: A Hugging Face folder, or a hub's id.
        run: Directory to write; it must not exist yet.
        revision: Branch, tag or commit of a hub's id.
    """
    from jaxformer.tokenizers import tokenizer
    from jaxformer.training.checkpoints import Checkpoints
    from jaxformer.training.run import Config, write_run
    from jaxformer.training.update import TrainState

    if run.exists():
        raise ValueError(f"{run} exists; choose another directory")
    folder = locate(source, revision)
    tok = tokenizer.load(folder)
    cfg, params = load(folder)
    write_run(run, Config(model=cfg, run_dir=str(run)), tok)
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save(TrainState(jax.numpy.zeros((), "int32"), params, opt_state=(), rng=jax.random.key(0)))
    checkpoints.close()
    carry(folder, run)
    print(f"{run}: {specs.count(model.spec(cfg), cfg):,} parameters, and their {tok.file}")


def export(run: tyro.conf.Positional[Path], folder: tyro.conf.Positional[Path], family: str | None = None) -> None:
    """Writes a run of train.py as a folder that transformers reads.

    Args:
        run: Directory that train.py wrote.
        folder: Where to; it must not hold weights yet.
        family: The model_type to write, where several fit.
    """
    from jaxformer.training.run import load as load_run

    cfg, params, tok = load_run(run)
    save(folder, cfg, params, family, tok=tok)
    carry(run, folder)
    print(f"{folder}: {json.loads((folder / 'config.json').read_text())['model_type']}, with its {tok.file}")


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"info": info, "import": import_, "export": export, "verify": verify},
            prog="python -m jaxformer.hf",
            description=__doc__,
        )
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
