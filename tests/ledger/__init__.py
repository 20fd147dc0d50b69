"""The ledger: what was acknowledged is there, whatever happens."""
