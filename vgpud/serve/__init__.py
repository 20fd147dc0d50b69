"""The doors: gRPC server and its SO_PEERCRED relay."""
