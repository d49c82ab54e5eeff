"""The command ``jaxformer``, also ``python -m jaxformer``: all programs under one name. Only the chosen one is imported."""

import functools
import importlib
import sys

from jaxformer.cli.launch import launch
from jaxformer.parallel.exit_codes import USAGE as MISUSED

PROGRAMS = {
    "train": ("jaxformer.cli.train", "launch", "train a model: a shipped config such as quickstart, or a file of your own"),
    "sample": ("jaxformer.cli.sample", "main", "generate text from a run or a published model"),
    "evaluate": ("jaxformer.cli.evaluate", "main", "score text files: loss, perplexity, bits per byte"),
    "hf": ("jaxformer.hf.__main__", "main", "read, write and verify published checkpoints"),
    "plan": ("jaxformer.cost.command", "plan_command", "find out how much memory and time a run takes, before it runs"),
    "explain": ("jaxformer.cost.command", "explain_command", "show what a forward pass costs, step by step"),
    "mup": ("jaxformer.cli.mup", "main", "check mu-P: how the sizes of activations grow with the width"),
    "prove-resume": ("jaxformer.prove.resume", "program", "prove that a killed and resumed run ends like an undisturbed one"),
}
"""Command -> its module, the function there that takes the arguments, and what it is for."""
USAGE = "usage: jaxformer COMMAND [ARGUMENTS]"


def main() -> None:
    """The command. Exit code 2 for a command that does not exist."""
    name, *arguments = sys.argv[1:] or [""]
    if name in ("-h", "--help"):
        lines = [f"  {command:13} {about}" for command, (_, _, about) in PROGRAMS.items()]
        print(
            "\n".join(
                [USAGE, "", *lines, "", "jaxformer COMMAND --help explains a command; jaxformer --version prints the version."]
            )
        )
        return
    if name == "--version":
        print(f"jaxformer {importlib.import_module('jaxformer').__version__}")
        return
    command = name.replace("_", "-")
    if command not in PROGRAMS:
        from jaxformer.config.components import nearest

        said = f"unknown command {name!r}{nearest(name, PROGRAMS)}" if name else f"no command; known: {', '.join(PROGRAMS)}"
        sys.stderr.write(f"error: {said}\n{USAGE}\n")
        raise SystemExit(MISUSED)
    module, function, _ = PROGRAMS[command]
    program = getattr(importlib.import_module(module), function)
    if command == "train":  # it has exit codes of its own
        program(arguments)
    else:
        launch(functools.partial(program, arguments))
