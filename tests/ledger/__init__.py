"""Tests of the ledger: acknowledged writes are durable, whatever happens."""
