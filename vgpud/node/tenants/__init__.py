"""Suspension, move and resize of tenants, the rules that start them, and the processes of a tenant."""
