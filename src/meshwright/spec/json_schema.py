"""JSON Schema of the job file; the attribute docstrings of the sections are its descriptions.

Pydantic can read them, too. It then parses the source of every section whenever a job is loaded, which takes
longer than the rest of its work.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from meshwright.spec.validation_errors import JOB


class _DocumentedSchema(GenerateJsonSchema):
    """A schema whose properties have the docstrings of the fields as descriptions."""

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        """The schema of a section."""
        found = super().dataclass_schema(schema)
        for base in reversed(schema["cls"].__mro__[:-1]):
            for name, text in read_docstrings(base).items():
                found["properties"][name]["description"] = text
        return found


def read_docstrings(section: type) -> dict[str, str]:
    """The docstring under each field that a dataclass itself defines, by field."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(definition, ast.ClassDef), f"{section} is a class"
    found = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if not isinstance(text, ast.Expr) or not isinstance(text.value, ast.Constant):
            continue
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            found[field.target.id] = inspect.cleandoc(str(text.value.value))
    return found


def job_schema() -> dict[str, Any]:
    """JSON Schema of the job file.

    A preset may fill in the model and the cluster, so their keys are not required. Neither is the sequence
    length, which images do not have.
    """
    schema = JOB.json_schema(schema_generator=_DocumentedSchema)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Meshwright job"
    schema["required"] = ["model", "data", "train"]
    for section in ("DecoderModel", "ResNetModel", "Cluster"):
        schema["$defs"][section].pop("required", None)
    schema["$defs"]["Data"].pop("required")  # a mixture has no path
    model = schema["properties"]["model"]
    model["anyOf"] = model.pop("oneOf")  # a bare preset may be of either kind
    return schema
