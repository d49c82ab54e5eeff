"""Saved folders, read by Hugging Face transformers: the same tensors to the bit, the same logits to the bit.

    pip install -e '.[hf]' torch==2.13.0 transformers && python benchmarks/round_trip.py [FOLDER ...]

Each folder (unless given: those of tests/golden) is loaded, saved, and read with ``from_pretrained`` both as it was and as
it was saved; printed is how many tensors there are, how many differ, and by how much the logits of the two do.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

import jaxformer as jf
from jaxformer.hf import transformers_reference as reference

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from golden import weights  # noqa: E402
from published import NAMES, folder, legacy  # noqa: E402


@torch.no_grad()
def outputs(where: Path, original: Path) -> dict[str, np.ndarray]:
    """What transformers makes of a folder, for inputs drawn for the original one."""
    name = transformers.AutoConfig.from_pretrained(where).architectures[0]
    model = getattr(transformers, name).from_pretrained(where, dtype=torch.float32, attn_implementation="eager")
    inputs = reference.draw_inputs(np.random.RandomState(0), transformers.AutoConfig.from_pretrained(original), masked=False)
    return reference.outputs(model.eval(), inputs)


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print("| folder | tensors | differ | outputs differ by |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as root:
        given = [Path(argument) for argument in sys.argv[1:]]
        for name in [] if given else NAMES:
            config = weights.load(name)[0]
            folder(Path(root) / name, name, legacy(config) if transformers.__version__ < "5" else config)
            given.append(Path(root) / name)
        for where in given:
            again = Path(root) / "saved" / where.name
            jf.hf.save(again, *jf.hf.load(where))
            before, after = (load_file(one / "model.safetensors") for one in (where, again))
            differ = [key for key in before.keys() | after.keys() if not np.array_equal(before.get(key), after.get(key))]
            one, other = outputs(where, where), outputs(again, where)
            apart = max(float(np.abs(one[key] - other[key]).max()) for key in one if one[key].dtype == np.float32)
            print(f"| {where.name} | {len(before)} | {len(differ)} | {apart} |", flush=True)


if __name__ == "__main__":
    main()
