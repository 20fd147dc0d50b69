"""Slices for machines without a GPU: a server in the network (the door), a session process for each slice,
and the client.

The engine that carries CUDA calls over a connection is another program (engine.py). The client needs only the
standard library.
"""
