"""Tests of the unit files."""
