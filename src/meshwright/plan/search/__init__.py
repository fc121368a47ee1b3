"""The search over layouts: enumerates the legal ones, predicts and ranks them, explains the choice."""
