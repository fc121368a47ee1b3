"""Usage errors in our own words: unknown commands and options, missing arguments, bad values."""

from __future__ import annotations

import difflib
import re
from typing import Any

from meshwright.core.errors import Problem

VALUE_RULES = (
    (r"valid integer", "must be a whole number"),
    (r"valid number|valid float", "must be a number"),
    (r"greater than or equal to (\S+)", r"must be at least \1"),
    (r"less than or equal to (\S+)", r"must be at most \1"),
    (r"greater than (\S+)", r"must be more than \1"),
    (r"less than (\S+)", r"must be less than \1"),
    (r"not one of (.*)", r"must be one of \1"),
)
"""Messages of the parser about a value, and ours instead."""


def describe_usage(error: Any) -> Problem:
    """The problem of a usage error of typer, which has its own copy of click: classes are known by name."""
    context, kind, message = (
        getattr(error, "ctx", None),
        type(error).__name__,
        error.format_message().rstrip("."),
    )
    command = context.command_path if context is not None else "meshwright"
    see = f"See {command} --help"
    if kind == "NoSuchOption":
        near = [name for name in error.possibilities or () if name.startswith(error.option_name[:3])]
        fix = f"Did you mean {near[0]}?" if near else see
        return Problem("cli-usage", f"is not an option of {command}", path=error.option_name, fix=fix)
    if kind == "BadOptionUsage":
        return Problem("cli-usage", "needs a value", path=error.option_name, fix=see)
    if kind == "MissingParameter" and error.param is not None:
        return Problem("cli-usage", "is missing", path=_name(error.param), fix=see)
    if kind == "BadParameter" and error.param is not None:
        return Problem("cli-usage", _describe_value(error.message), path=_name(error.param), fix=see)
    if context is not None and message.startswith(("Missing command", "No such command")):
        return _describe_command(message, command, context.command.list_commands(context))
    if extra := re.search(r"unexpected extra argument\S* \((.*)\)", message):
        return Problem("cli-usage", "is one argument too many", path=extra[1], fix=see)
    return Problem("cli-usage", message, fix=see)


def _name(parameter: Any) -> str:
    """``--top``, or the argument as the usage line has it."""
    options = [name for name in parameter.opts if name.startswith("--")]
    return options[0] if options else str(parameter.metavar or parameter.name.upper())


def _describe_value(message: str) -> str:
    for pattern, words in VALUE_RULES:
        if found := re.search(pattern, message):
            return found.expand(words).replace("'", "").rstrip(".")
    return f"has a bad value: {message.rstrip('.')}"


def _describe_command(message: str, command: str, commands: list[str]) -> Problem:
    everything = f"Commands: {', '.join(commands)}"
    if message.startswith("Missing"):
        return Problem("cli-usage", "needs a command", path=command, fix=everything)
    quoted = re.search(r"'(.*?)'", message)
    name = quoted[1] if quoted else ""
    near = difflib.get_close_matches(name, commands, n=1)
    fix = f"Did you mean {command} {near[0]}?" if near else everything
    return Problem("cli-usage", f"is not a command of {command}", path=name, fix=fix)
