"""Optional packages: whether one is installed, its version, and an error that names the missing extra."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from meshwright.core.errors import missing_package


def has_package(name: str) -> bool:
    """Whether a package can be imported."""
    try:
        return find_spec(name) is not None
    except ImportError:
        return False


def package_version(name: str) -> tuple[int, ...] | None:
    """Major and minor version of an installed package, without importing it; None if it is not known."""
    try:
        return tuple(int(part) for part in version(name).split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return None


def require_packages(*packages: tuple[str, str], needed_for: str) -> None:
    """Fail early if a package is missing.

    Args:
        packages: Pairs of package and extra.
        needed_for: What needs them, for the message.

    Raises:
        UserError: A package is missing; the message names its extra.
    """
    for package, extra in packages:
        if not has_package(package):
            raise missing_package(package, extra, needed_for)
