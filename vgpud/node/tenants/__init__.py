"""Suspends, moves and resizes tenants. It also has the rules that start such changes, and finds the processes
of a tenant.
"""
