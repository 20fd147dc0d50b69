"""Tests of the ledger: which acknowledged writes survive a kill, a power cut and a full disk."""
