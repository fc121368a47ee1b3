"""Models, each built so that its initial weights depend on (seed, parameter name) alone."""
