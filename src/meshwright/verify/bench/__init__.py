"""Benchmarks that run the real thing: the launcher's processes, the trainer, the plan."""
