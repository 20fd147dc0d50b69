"""Slices for machines without a GPU: the door in the network, the session behind it, and the client.

The engine that carries CUDA calls over a connection is another program (engine.py). The client needs only the
standard library.
"""
