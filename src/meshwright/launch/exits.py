"""Exit statuses of a rank."""

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_PEER_LOST = 75
"""Another rank failed first."""
