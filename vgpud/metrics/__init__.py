"""The daemon's figures as Prometheus reads them."""
