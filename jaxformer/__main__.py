"""``python -m jaxformer``: the command ``jaxformer``."""

from jaxformer.cli.program import main

if __name__ == "__main__":
    main()
