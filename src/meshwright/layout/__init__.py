"""Facts about a layout that the planner and the runtime share: axes, stages, shards, buckets. No torch."""
