"""Benchmarks on real ranks: scaling of steps, and the operations that ``probe`` times."""
