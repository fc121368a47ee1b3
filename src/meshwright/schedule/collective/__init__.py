"""Collective algorithms as data: steps of sends and receives, a prover and counts. No torch."""
