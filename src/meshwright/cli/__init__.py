"""The command line: each command parses its arguments, calls the API, prints and exits."""

from meshwright.cli.app import main

__all__ = ["main"]
