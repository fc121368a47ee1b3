"""The time model: how long a training step takes, part by part, on any device and with any layout."""
