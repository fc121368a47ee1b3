"""The parallelisms, each applied to a model by one function; see apply.py for the order."""
