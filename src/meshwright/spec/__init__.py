"""What, on what, how: model, cluster, layout and job as frozen dataclasses, and what is legal. No torch."""
