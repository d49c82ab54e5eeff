"""``python -m jaxformer.plan CONFIG --topology v5e:4x4``: what a run needs and takes, before it runs."""

from jaxformer.cost import command

if __name__ == "__main__":
    command.main(command.plan_command)
