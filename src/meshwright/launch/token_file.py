"""The token file of a run on several nodes: a secret that only this user can read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from meshwright.core.errors import Problem, UserError

SHORTEST = 16
"""Characters of a token, at least."""


def read_token(path: Path) -> bytes:
    """Read a token.

    Raises:
        UserError: There is none, or others can read it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        fix = "Copy the token file of the command that started the run, with mode 0600"
        raise UserError(
            Problem("token-file-missing", rule, "token_file", str(path), fix, is_argument=True)
        ) from None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.geteuid():
            rule = (
                f"has mode {stat.S_IMODE(status.st_mode):04o} and owner {status.st_uid}; only you may read it"
            )
            fix = f"chmod 0600 {path}, as its owner"
            raise UserError(Problem("token-file-mode", rule, "token_file", str(path), fix, is_argument=True))
        token = file.read(4096).strip()
    if len(token) < SHORTEST:
        rule = f"has {len(token)} characters; a token has at least {SHORTEST}"
        fix = "Delete it: train writes a new one"
        raise UserError(Problem("token-file-short", rule, "token_file", str(path), fix, is_argument=True))
    return token


def create_token(path: Path) -> bytes:
    """The token of a run: that of the file, or a new one with mode 0600."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        fix = "Use another path"
        raise UserError(
            Problem("token-file-missing", rule, "token_file", str(path), fix, is_argument=True)
        ) from None
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32) + "\n")
    return read_token(path)
