"""What other programs write: whatever it is, it is understood or refused, and nothing else happens.

A parser has a target in targets.py or, in C, a program in native/; corpus/NAME keeps inputs of it.

Elsewhere: policies (tests/policy/test_fuzz.py), quantities (tests/model), more of the usage
pages (tests/lease), MPS control daemons' answers (tests/mps), the hook's JSON (tests/runtime).
"""
