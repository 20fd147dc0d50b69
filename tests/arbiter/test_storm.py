"""Threads of one program make calls of all memory families at once (tests/native/storm.c), under a limit
of memory and a share.
"""

import subprocess
from pathlib import Path

import pytest

from tests.arbiter.conftest import made_card
from tests.arbiter.test_edges import WAIT_S, environment, lease_of
from tests.e2e.support import eventually
from tests.native.harness import LIBVGPU, TEST_BUILD
from tests.native.test_api import sanitized
from vgpud.lease import read_usage


def under_threads() -> tuple[Path, ...]:
    found = subprocess.run(["cc", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip()), TEST_BUILD / "threads" / "libvgpu.so"


LIBRARIES = {"shipped": lambda: (LIBVGPU,), "address": sanitized, "thread": under_threads}
WORDS = {"shipped": ("6", "200", "2"), "address": ("6", "60", "2"), "thread": ("6", "40", "2", "alone")}


@pytest.mark.parametrize("engine", ["cut", "gate"])
@pytest.mark.parametrize("flavour", LIBRARIES)
def test_threads_that_call_all_families_of_functions_leave_no_memory_charged(
    tmp_path: Path, engine: str, flavour: str
) -> None:
    """Each call succeeds or is refused for memory, and no sanitizer complains. At the end only the context is
    charged.
    """
    more = {
        "LD_PRELOAD": " ".join(map(str, LIBRARIES[flavour]())),
        "ASAN_OPTIONS": "detect_leaks=0",
        # the simulated driver is built without the sanitizer, which thus does not see the locks of the driver
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1 report_thread_leaks=0",
    }
    with made_card(engine) as card:
        lease = lease_of(card)
        output = tmp_path / "free"
        with (
            output.open("w") as stdout,
            subprocess.Popen(
                [TEST_BUILD / "storm", *WORDS[flavour]],
                env=environment(card, lease) | more,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
            ) as storm,
        ):
            try:
                eventually(
                    lambda: storm.poll() is not None or output.read_text().count("\n") == 3,
                    "the storm ends",
                    WAIT_S,
                )
                left = read_usage(lease).device(0).used_bytes
                _, errors = storm.communicate("\n", timeout=WAIT_S)
            finally:
                storm.kill()
        assert (storm.returncode, errors) == (0, "")
        before, *after = map(int, output.read_text().split())
        assert after == [before] * 2
        assert left == 0
        eventually(lambda: read_usage(lease).processes == (), "no slot is left")
