"""Boots a Debian with its own systemd by systemd-nspawn, and runs commands in it by nsenter."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

BOOT_SECONDS = 60
COMMAND_SECONDS = 120


#: Allows the system call by which engine `cut` duplicates descriptors. Root may make it on a host, and
#: systemd-nspawn filters it by default.
_AS_A_HOST = ("--system-call-filter=pidfd_getfd",)


class NoBoot(Exception):
    """This machine cannot boot a container, for a reason that is not in vgpud."""


class Machine:
    """Boots `folder` as the machine's root, with `debs` as /debs. Raises NoBoot."""

    def __init__(self, folder: Path, debs: Path) -> None:
        self.root = folder
        self.log = folder.with_suffix(".log")
        self.leader = 0
        options = ["--register=no", "--keep-unit", "--link-journal=no", "--private-network", "--console=pipe"]
        command = ["systemd-nspawn", "--boot", "--quiet", f"--directory={folder}", f"--bind={debs}:/debs"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *options, *_AS_A_HOST, "--hostname=node"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_for_boot()

    def _wait_for_boot(self) -> None:
        end = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            for pid in map(int, children.read_text().split()):
                self.leader = pid
                state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
                if state in ("running", "degraded"):
                    return
            time.sleep(0.2)
        said = self.log.read_text(errors="replace").strip().splitlines()[-3:]
        self.stop()
        raise NoBoot(f"systemd-nspawn boots no machine here: {'; '.join(said) or 'it says nothing'}")

    def run(
        self, *words: str, user: str = "root", check: bool = True, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in the machine with a clean environment. With `check` a failure fails the test."""
        done = subprocess.run(
            self.inside(*words, user=user, env=env),
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
            errors="replace",
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(words)} ended {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def inside(self, *words: str, user: str = "root", env: Mapping[str, str] | None = None) -> list[str]:
        """The command line that runs a command in the machine with a clean environment."""
        as_user = [] if user == "root" else ["runuser", "-u", user, "--"]
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        named = [f"{key}={value}" for key, value in (env or {}).items()]
        spaces = ["nsenter", "-t", str(self.leader), "-m", "-u", "-i", "-n", "-p", "-C", "--wdns=/", "--"]
        return [*spaces, "env", "-i", path, "LC_ALL=C.UTF-8", *named, *as_user, *words]

    def shell(self, script: str, check: bool = True) -> str:
        return self.run("sh", "-ec", script, check=check).stdout.strip()

    def unit(self, name: str, key: str) -> str:
        """A property of a unit, as `systemctl show` prints it."""
        return self.run("systemctl", "show", "--value", "-p", key, name).stdout.strip()

    def eventually(self, holds: Callable[[], object], what: str, seconds: float = 300) -> None:
        """Waits until `holds()` is true. The bound in `seconds` only ends a test that would never finish."""
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                journal = self.run("journalctl", "-b", "--no-pager", "-n", "60", check=False).stdout
                raise AssertionError(f"not within {seconds:g} s: {what}\n{journal}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends the machine, whatever its state, and removes its root."""
        if self.leader:
            with suppress(ProcessLookupError):
                # kills the first process of the machine's pid namespace, and so all others
                os.kill(self.leader, signal.SIGKILL)
        self.process.kill()  # ends systemd-nspawn, which alone would leave the first process behind
        self.process.wait()
        end = time.monotonic() + 10
        while time.monotonic() < end:
            shutil.rmtree(self.root, ignore_errors=True)
            if not self.root.exists():
                break
            time.sleep(0.2)
