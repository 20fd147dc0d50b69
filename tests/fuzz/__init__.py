"""What others write: whatever it is, it is understood or refused, and nothing else happens.

Policies are in tests/policy/test_fuzz.py, quantities in tests/model/test_quantity.py, usage pages
in tests/lease, answers of MPS control daemons in tests/mps/test_answers.py, the hook's JSON in tests/runtime/test_hook.py.
"""
