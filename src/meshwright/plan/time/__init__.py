"""The time model: the parts of a training step in seconds, for any layout and device."""
