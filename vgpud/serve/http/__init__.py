"""The read-only HTTP pages: metrics for Prometheus, and the status page."""
