"""The store of allocations: the only writer of the book, the ledger, the events for watchers and the
tally.
"""
