"""``python -m jaxformer.mup CONFIG.py``: how the sizes of activations grow with the width, with and without mu-P."""

from jaxformer.cli.launch import launch
from jaxformer.cli.mup import main

if __name__ == "__main__":
    launch(main)
