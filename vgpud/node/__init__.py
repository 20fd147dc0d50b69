"""Serves requests on the node: decision, intent, effects, outcome."""
