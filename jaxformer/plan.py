"""``python -m jaxformer.plan CONFIG --topology v5e:4x4``: what a run needs and takes, before it runs."""

import sys

from jaxformer.cli.launch import launch
from jaxformer.cost import command

if __name__ == "__main__":
    launch(lambda: command.plan_command(sys.argv[1:]))
