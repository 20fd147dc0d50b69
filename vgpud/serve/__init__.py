"""The daemon's servers: gRPC with a relay that identifies callers by SO_PEERCRED, the kubelet's and DRA's
plugins, and the containers' socket.
"""
