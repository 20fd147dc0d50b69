"""The daemon's metrics for Prometheus."""
