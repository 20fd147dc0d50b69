"""Data from other programs: vgpud understands it or refuses it, and does nothing else.

A Python parser has a target in targets.py, a C parser a program in native/. corpus/NAME keeps inputs.

Elsewhere: policies (tests/policy/test_fuzz.py), quantities (tests/model), more of the usage pages
(tests/lease), MPS control daemons' answers (tests/mps), the hook's JSON (tests/runtime).
"""
