"""Checks that run training steps: prove, dry run and benchmarks."""
