"""From a job to a run folder: prepares data, plans, starts ranks, collects results. No torch at import."""
