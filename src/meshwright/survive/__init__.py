"""What outlives a failure: checkpoints today; membership and recovery later."""
