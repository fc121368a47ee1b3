"""The job as frozen dataclasses (model, cluster, layout, ...), presets and legality rules. No torch."""
