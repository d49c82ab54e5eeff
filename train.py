"""Train a transformer: ``python train.py [CONFIG.py] [--field value ...] [--check]``. ``--help`` explains every field.

The program itself is ``jaxformer.cli.train``; the installed command ``jaxformer train`` is the same.
"""

import sys

from jaxformer.cli.train import launch, main

__all__ = ["launch", "main"]

if __name__ == "__main__":
    launch(sys.argv[1:])
