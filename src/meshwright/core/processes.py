"""Starting processes with multiprocessing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def without_main() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's main module in the processes that start now.

    They are started by the name of a function. A script without ``if __name__ == "__main__"`` would run
    again in every process, and the main module of ``python -`` has no file to import.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
