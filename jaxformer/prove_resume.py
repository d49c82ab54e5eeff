"""``python -m jaxformer.prove_resume CONFIG``: a run that is killed and resumed ends as one that is not."""

from jaxformer.prove.resume import launch

if __name__ == "__main__":
    launch()
