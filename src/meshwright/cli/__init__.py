"""One command each, thin: reads arguments, calls the layers below, prints, exits."""

from meshwright.cli.app import main

__all__ = ["main"]
