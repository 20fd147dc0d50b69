"""The daemon's servers: gRPC with a relay that identifies callers by the kernel's credentials, the plugins
for the kubelet and DRA, the socket for container runtimes, and the HTTP pages.
"""
