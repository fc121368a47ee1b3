"""Benchmarks that run the real thing: the launcher's processes, the session, the plan."""
