"""``python -m jaxformer.sample RUN "prompt"``: text from a trained model."""

from jaxformer.cli.sample import launch

if __name__ == "__main__":
    launch()
