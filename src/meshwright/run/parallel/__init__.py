"""One module a parallelism; ``apply`` shows the order on one screen."""
