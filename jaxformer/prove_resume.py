"""``python -m jaxformer.prove_resume CONFIG``: a run that is killed and resumed ends as one that is not."""

import sys

from jaxformer.cli.launch import launch
from jaxformer.prove.resume import program

if __name__ == "__main__":
    launch(lambda: program(sys.argv[1:]))
