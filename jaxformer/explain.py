"""``python -m jaxformer.explain CONFIG``: what a model's forward costs. ``jf.explain`` is ``jaxformer.cost.explain``."""

from jaxformer.cost import command

if __name__ == "__main__":
    command.main(command.explain_command)
