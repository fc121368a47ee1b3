"""Tables, plots, HTML pages and experiment trackers, made from the events of a run. No torch."""
