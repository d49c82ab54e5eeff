"""``python -m jaxformer.mup CONFIG.py``: how the sizes of activations grow with the width, with and without mu-P."""

from jaxformer.cli.mup import launch

if __name__ == "__main__":
    launch()
