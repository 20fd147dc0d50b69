"""What holds for the tests of every room."""

from hypothesis import settings

# no test is timed: a machine that is busy with something else must not fail one
settings.register_profile("vgpud", deadline=None)
settings.load_profile("vgpud")
