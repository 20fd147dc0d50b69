"""Listings for operators: use, meters and processes."""
