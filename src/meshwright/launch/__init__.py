"""Starts and supervises ranks. Torch is imported only for the rendezvous store."""
