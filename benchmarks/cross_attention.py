"""What a trained encoder–decoder looks at while it writes: the cross-attention of one example, as a picture.

python benchmarks/cross_attention.py runs/dates "the 3rd of May, 1998" --image benchmarks/figures/cross_attention.png
"""

import argparse
from pathlib import Path

import numpy as np

import jaxformer as jf
from jaxformer.training.evaluate import translate


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("source")
    parser.add_argument("--image", type=Path, required=True)
    arguments = parser.parse_args()

    cfg, params, tok = jf.load(arguments.run)
    target = translate(params, cfg, tok, [arguments.source], cfg.max_length)[0]
    source, tokens = (np.array([ids]) for ids in (tok.encode(arguments.source), tok.encode(target, bos=True)))
    forward = jf.capture(lambda: jf.forward(params, tokens, cfg, source=source), "*cross_attention.weights")
    _, seen = forward()
    weights_TS = np.mean([np.asarray(weights)[0].mean((0, 1)) for weights in seen.values()], axis=0)

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot(title=f"{arguments.source}  →  {target}", xlabel="read", ylabel="written")
    image = axes.imshow(weights_TS, cmap="viridis", vmin=0, aspect="auto")
    axes.set_xticks(range(source.shape[1]), [*arguments.source.replace(" ", "␣")])
    axes.set_yticks(range(tokens.shape[1]), [*target, "end"])
    figure.colorbar(image, label="weight, mean over layers and heads")
    arguments.image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.image, dpi=120)
    print(f"{arguments.source} -> {target}")


if __name__ == "__main__":
    main()
