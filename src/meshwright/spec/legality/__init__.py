"""The legality table: which settings can be combined, why not, and the nearest legal layout."""
