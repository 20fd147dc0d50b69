"""Carries out requests on the node, in the order: decision, intent, effects, outcome."""
