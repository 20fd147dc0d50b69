"""Benchmarks: numbers for people to compare, never pass or fail."""
