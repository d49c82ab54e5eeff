"""The command-line programs, and models from wherever they are."""
