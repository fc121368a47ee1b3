"""Which settings can be combined, by axis and section; and the nearest legal layout."""
