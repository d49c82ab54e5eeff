"""``python -m jaxformer.explain CONFIG``: what a model's forward costs. ``jf.explain`` is ``jaxformer.cost.explain``."""

import sys

from jaxformer.cli.launch import launch
from jaxformer.cost import command

if __name__ == "__main__":
    launch(lambda: command.explain_command(sys.argv[1:]))
