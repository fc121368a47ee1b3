"""Starts ranks and watches over them. Torch only where the rendezvous store needs it."""
