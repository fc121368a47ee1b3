"""Constrained field types shared by the sections of a job.

A section is a plain frozen dataclass. Pydantic reads it from TOML and reports all mistakes at once. The
attribute docstring under each field feeds the JSON Schema and the documentation.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

SECTION_CONFIG = ConfigDict(extra="forbid", strict=False)
"""Unknown keys are errors."""

Count = Annotated[int, Field(ge=1, strict=True)]
"""A whole number, at least 1."""
Natural = Annotated[int, Field(ge=0, strict=True)]
"""A whole number, at least 0."""
Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, strict=True)]
OpenFraction = Annotated[float, Field(ge=0, lt=1, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]
"""A fraction above 0."""
Name = Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=100)]
"""Letters, digits, dots and dashes: it names a folder."""
Location = Annotated[str, Field(min_length=1)]
"""A path, not empty."""
HOST_PORT = r"^\S+:\d{1,5}$"
HostPort = Annotated[str, Field(pattern=HOST_PORT, max_length=300)]
"""A host and a TCP port."""
Flag = Annotated[bool, Field(strict=True)]
