"""What holds for the tests of every room."""

from hypothesis import settings

# no test is timed: a machine that is busy with something else must not fail one
# the same examples in each run: a failure is the change's; `--hypothesis-profile=explore` looks for new ones
settings.register_profile("explore", deadline=None)
settings.register_profile("vgpud", deadline=None, derandomize=True)
settings.load_profile("vgpud")
