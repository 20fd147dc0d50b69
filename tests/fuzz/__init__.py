"""Data from other programs: vgpud understands it or refuses it, and does nothing else.

A Python parser has a target in targets.py, a C parser a program in native/. corpus/NAME keeps inputs.

Other folders test policies (tests/policy/test_fuzz.py), quantities (tests/model), more of the usage pages
(tests/lease), the answers of MPS control daemons (tests/mps) and the hook's JSON (tests/runtime).
"""
