"""Tenants: how they are suspended, moved and resized, when, and which processes are theirs."""
