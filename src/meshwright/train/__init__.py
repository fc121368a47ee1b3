"""The training loop of one rank: trainer, mixed precision, optimizer, evaluation, generation."""
