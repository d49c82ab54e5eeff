"""Conversations as text, by the Jinja template that a published model brings.

Templates are other people's programs: they run in Jinja's sandbox, in a process of limited time and memory, see nothing but
plain values, and an attribute that begins with an underscore, where the ways out of a sandbox begin, is an error.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxformer.config.components import nearest
from jaxformer.tokenizers import limited

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's reasoning is given under; templates read the first, some the second."""


def choose(known: str | list[dict[str, str]] | None, wanted: str | None, tools: Any) -> str:
    """A template: the one ``wanted``, by its name or its text, else the model's own; of several, the one that fits
    the call."""
    if isinstance(known, list):
        named = {entry["name"]: entry["template"] for entry in known}
        name = wanted or ("tool_use" if tools is not None and "tool_use" in named else "default")
        if name in named:
            return named[name]
        if wanted is None:
            raise ValueError(
                f"this model has several chat templates and no default; pass template= with one of {sorted(named)}"
            )
        if "{" not in wanted:
            raise ValueError(f"this model has no chat template {wanted!r}{nearest(wanted, named)}")
    template = wanted if wanted is not None else known
    if not isinstance(template, str):
        raise ValueError("this tokenizer has no chat template; pass template=, or put a chat_template.jinja in its folder")
    return template


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """What the template makes of a conversation. Raises ValueError where it refuses or fails, and where it takes more than 1.5
    seconds of computing, 500 MB of memory or 32 million characters."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError('messages must be a list of messages, such as [{"role": "user", "content": "Hello"}]')
    if tools is not None and (isinstance(tools, str | Mapping) or not all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError("tools must be a list of JSON schemas, each a dict")
    context = {"documents": None, **variables, "tools": tools, "messages": [_message(m, i) for i, m in enumerate(messages)]}
    values = {name: _plain(value, name) for name, value in context.items()}
    if importlib.util.find_spec("jinja2") is None:
        raise ValueError("chat templates need the package jinja2; install jaxformer[hf]")
    try:
        return limited.call("render", template, {**values, "add_generation_prompt": add_generation_prompt})
    except limited.LimitError as error:
        raise ValueError(f"the chat template: {error}") from error


def strings(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """``(where, text)`` of every text in a value, keys too."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from strings(key, f"a key of {where}")
            yield from strings(inner, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            yield from strings(inner, f"{where}[{at}]")


def _message(message: Any, at: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{at}] must be a dict with a role and content, not {type(message).__name__}")
    # Interfaces give content=None or tool_calls=None where there is none; templates print it, or ask only what is defined.
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any, where: str) -> Any:
    """A copy that consists of JSON's types: templates must not call the methods of anything else."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key, f"a key of {where}"): _plain(inner, f"{where}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{where}[{at}]") for at, inner in enumerate(value)]
    raise ValueError(f"{where} is {type(value).__name__}; a chat template takes text, numbers, lists and dicts")
