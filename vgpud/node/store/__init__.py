"""The store of allocations: the one writer of book, ledger, watchers' events and tally."""
