"""Suspends, moves and resizes tenants. The package also has the rules that start such changes, and finds the
processes of a tenant.
"""
