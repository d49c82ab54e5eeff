"""Train a transformer: ``python train.py [CONFIG.py] [--field value ...] [--check]``. ``--help`` explains every field.

The program itself is ``jaxformer.cli.train``; the installed command ``jaxformer train`` is the same.
"""

import sys

from jaxformer.cli.train import DEFAULT, launch, main, make_placement

__all__ = ["DEFAULT", "launch", "main", "make_placement"]

if __name__ == "__main__":
    launch(sys.argv[1:])
