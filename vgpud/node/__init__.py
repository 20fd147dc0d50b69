"""Serves requests on the node: choice, intent, effects, outcome."""
