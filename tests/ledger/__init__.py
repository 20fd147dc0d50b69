"""The ledger: acknowledged writes are durable, whatever happens."""
