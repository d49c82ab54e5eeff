"""Commands for published folders: jaxformer hf info|import|export|verify. Each explains its options with --help."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from jaxformer.cli.launch import launch
from jaxformer.config import spec as specs
from jaxformer.hf import load, safetensors_files, save
from jaxformer.hf.destination import staged
from jaxformer.hf.hub import copy_generation_config, generation_config, locate, no_folder
from jaxformer.hf.load import prepare, read_config
from jaxformer.hf.verify import TOLERANCE, Row, compare
from jaxformer.nn import model
from jaxformer.parallel import exit_codes
from jaxformer.tokenizers.json_files import read_json

Source = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
Folders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER [FOLDER ...]")]


def info(source: Source, revision: str | None = None) -> None:
    """Prints the family, the number of parameters and the config of a model. Reads its config and headers, no tensors.

    Args:
        source: A Hugging Face folder, or the id of a model on a hub.
        revision: The branch, tag or commit of the model on the hub.
    """
    folder = locate(source, revision)
    values = read_json(folder / "config.json")
    tensors = safetensors_files.find(folder)
    _, cfg = read_config(values, tensors.entries.keys())
    dtypes = sorted({entry.dtype for entry in tensors.entries.values()})
    print(f"{values['model_type']}: {specs.count(model.spec(cfg), cfg):,} parameters in {', '.join(dtypes)}")
    print(cfg)


def verify(folders: Folders, tolerance: float = TOLERANCE, markdown: bool = False) -> None:
    """Loads each folder and compares the results, quantity by quantity and layer by layer, with reference results.

    The reference is the file reference.npz of the folder. Without it, transformers (which must be installed, with torch)
    computes the reference for random inputs. Everything is computed in float32. If there is a config_legacy.json beside
    config.json, it must describe the same model. Fails where a difference is above the tolerance.

    Args:
        folders: Hugging Face folders. tests/golden/README.md describes the arrays of a reference.npz.
        tolerance: The largest difference allowed, relative to the largest absolute value of the reference.
        markdown: Print a table with a line for each folder, instead of a line for each quantity.
    """
    failed = False
    if markdown:
        print(f"| folder | {' | '.join(COLUMNS)} | older config |\n|{'---|' * (len(COLUMNS) + 2)}")
    for folder in folders:
        folder = Path(os.path.expanduser(folder))
        values = read_json(folder / "config.json")
        cfg, params = load(folder, "float32")
        legacy = folder / "config_legacy.json"
        same = prepare(folder, "float32", config=read_json(legacy))[0] == cfg if legacy.exists() else None
        reference, source = _reference(folder)
        eos, pad = values.get("eos_token_id"), values.get("pad_token_id") or 0
        rows = list(compare(cfg, params, values["model_type"], reference, eos, pad))
        if not rows:
            raise ValueError(f"{source} of {folder} has none of the arrays that can be compared")
        failed = failed or same is False or any(not row.relative <= tolerance for row in rows)
        if markdown:
            _print_line(folder.name, rows, same)
        else:
            print(f"{folder}, against {source}")
            _print_rows(rows, tolerance, same)
    if failed:
        sys.exit(exit_codes.FAILED)


def _reference(folder: Path) -> tuple[dict, str]:
    """The reference arrays, and where they come from."""
    path = folder / "reference.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays), path.name
    try:
        from jaxformer.hf import transformers_reference
    except ImportError as error:
        raise FileNotFoundError(f"{folder} has no reference.npz to compare with; install torch and transformers") from error
    version = transformers_reference.transformers.__version__
    return transformers_reference.reference(folder), f"transformers {version}"


def _print_rows(rows: list[Row], tolerance: float, same: bool | None) -> None:
    for row in rows:
        mark = "" if row.relative <= tolerance else "   <- above the tolerance"
        print(f"  {row.quantity:32} {row.absolute:10.2e} of {row.scale:10.3e}: {row.relative:.1e}{mark}")
    if same is not None:
        print(f"  {'config_legacy.json':32} {'the same model' if same else 'ANOTHER model'}")
    first = next((row.quantity for row in rows if not row.relative <= tolerance), "none")
    print(f"  {'first above ' + format(tolerance, 'g'):32} {first}")


COLUMNS = {
    "unpadded": ", unpadded",
    "padded": ", padded",
    "hidden states": "coder ",
    "loss": "loss",
    "gradients": "gradient",
    "greedy": "greedy",
    "beams": "beam",
}
"""Column of the table -> text in the names of its quantities."""


def _print_line(name: str, rows: list[Row], same: bool | None) -> None:
    cells = []
    for text in COLUMNS.values():
        differences = [row.relative for row in rows if text in row.quantity]
        cells.append(f"{max(differences):.0e}" if differences else "")
    cells.append({None: "", True: "same", False: "differs"}[same])
    print(f"| {name} | " + " | ".join(cells) + " |")


def import_(source: Source, run: Run, revision: str | None = None) -> None:
    """Writes a published model as a run directory, for jaxformer.load, jaxformer.sample and train.py --init.from.

    Args:
        source: A Hugging Face folder, or the id of a model on a hub.
        run: The directory to write; it must not exist yet.
        revision: The branch, tag or commit of the model on the hub.
    """
    from jaxformer.tokenizers import tokenizer
    from jaxformer.training.checkpoints import Checkpoints
    from jaxformer.training.run import Config, write_run
    from jaxformer.training.update import TrainState

    run = Path(os.path.expanduser(run))
    if run.exists():
        raise ValueError(f"{run} already exists; choose another directory")
    folder = locate(source, revision)
    tok = tokenizer.load(folder)
    cfg, read = prepare(folder)
    with staged(run) as partial:
        params = read()
        write_run(partial, Config(model=cfg, run_dir=str(run)), tok)
        checkpoints = Checkpoints(partial / "checkpoints")
        checkpoints.save(TrainState(jax.numpy.zeros((), "int32"), params, opt_state=(), rng=jax.random.key(0)))
        checkpoints.close()
        copy_generation_config(folder, partial)
    print(f"{run}: {specs.count(model.spec(cfg), cfg):,} parameters, and their {tok.file}")


def export(
    run: Run,
    folder: Folder,
    family: str | None = None,
    trust: bool = False,
    overwrite: bool = False,
) -> None:
    """Writes a run of train.py as a folder that transformers reads.

    Args:
        run: The directory that train.py wrote.
        folder: The folder to write; without --overwrite it must not hold weights yet.
        family: The model_type to write, where several describe the model.
        trust: Follow the import paths in the run's config.json, which runs their code.
        overwrite: Replace the model that the folder holds. Other files in it stay.
    """
    from jaxformer.training.run import load as load_run

    run, folder = Path(os.path.expanduser(run)), Path(os.path.expanduser(folder))
    if not run.is_dir():
        raise FileNotFoundError(no_folder(run))
    if (run / "config.json").is_file() and "model_type" in read_json(run / "config.json"):
        raise ValueError(f"{run} is no run of train.py but a published folder already")
    cfg, params, tok = load_run(run, trust=trust)
    save(folder, cfg, params, family, tok=tok, generation=generation_config(run), overwrite=overwrite)
    print(f"{folder}: {read_json(folder / 'config.json')['model_type']}, with its {tok.file}")


def main(arguments: list[str]) -> None:
    """The command."""
    commands: dict[str, Any] = {"info": info, "import": import_, "export": export, "verify": verify}
    description = exit_codes.below(__doc__, failed="an error, or in verify a difference above the tolerance")
    tyro.extras.subcommand_cli_from_dict(commands, prog="jaxformer hf", description=description, args=arguments)


if __name__ == "__main__":
    launch(lambda: main(sys.argv[1:]))
