"""What is served by HTTP, all of it read-only: figures for Prometheus, and the status page."""
