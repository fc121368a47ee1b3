"""Checks that need the runtime: prove, dry run and benchmarks."""
