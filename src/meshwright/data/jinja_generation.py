"""The ``{% generation %}`` block of newer chat templates, a jinja extension.

It encloses answers. ``jinja_template`` finds answers by prefixes for all templates, so the block only
renders its content.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationBlocks(Extension):
    """Lets templates with ``{% generation %}`` compile."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
