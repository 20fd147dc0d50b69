"""What others write: whatever it is, it is understood or refused, and nothing else happens.

Elsewhere: policies (tests/policy/test_fuzz.py), quantities (tests/model), more of the usage
pages (tests/lease), MPS control daemons' answers (tests/mps), the hook's JSON (tests/runtime).
"""
