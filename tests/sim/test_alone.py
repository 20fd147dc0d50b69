"""The simulator is a CMake project of its own, which is configured and built without the other native
parts.
"""

from tests.simnode import ROOT


def test_the_simulator_builds_without_the_rest_of_the_source_tree() -> None:
    """The test configures the simulator's project. ./dev build has built it for test_sanitizers.py."""
    alone = ROOT / "build" / "native-thread"
    assert f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT / 'native/sim'}\n" in (alone / "CMakeCache.txt").read_text()
    assert (alone / "lib" / "libcuda.so.1").exists()
    assert (alone / "bin" / "vgpu-sim").exists()
