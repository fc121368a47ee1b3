"""Exit statuses of a rank, as the supervisor reads them."""

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_PEER_LOST = 75
"""Another rank went away first; this one is not the cause."""
