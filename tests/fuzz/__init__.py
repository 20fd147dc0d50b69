"""What others write: whatever it is, it is understood or refused, and nothing else happens.

Elsewhere: policies (tests/policy/test_fuzz.py), quantities (tests/model/test_quantity.py), more of the
usage pages (tests/lease), answers of MPS control daemons (tests/mps), the hook's JSON (tests/runtime/test_hook.py).
"""
