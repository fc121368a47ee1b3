"""The ``{% generation %}`` block of newer chat templates, which jinja itself does not know.

It encloses what an assistant writes. Answers are found by prefixes for every template alike (see
``jinja_template``), so the block's content is simply written.
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
