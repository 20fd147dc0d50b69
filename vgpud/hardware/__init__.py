"""The only door to NVML: immutable snapshots, MIG changes, device nodes and Xid events."""
