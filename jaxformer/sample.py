"""``python -m jaxformer.sample RUN "prompt"``: text from a trained model."""

from jaxformer.cli.launch import launch
from jaxformer.cli.sample import main

if __name__ == "__main__":
    launch(main)
