"""Tests of the ledger: acknowledged writes survive a kill, a power cut and a full disk."""
