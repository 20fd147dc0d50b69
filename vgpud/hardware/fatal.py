"""Keeps the reasons why devices are unusable after fatal events, because the driver reports a fatal event
only once.
"""

import json
import threading
from contextlib import suppress
from pathlib import Path

import structlog

from vgpud.model.log_event import LogEvent

log = structlog.get_logger(__name__)


class FatalEvents:
    """One sentence for each device (by UUID) that had a fatal event. A sentence is kept until the device is
    repaired, or the driver or the node is started again. Thread-safe.

    The sentences are in a file below /run, so that a restart of vgpud keeps them and a reboot does not.
    `driver` is the sysfs folder of the driver's module; its inode changes when the module is loaded again.
    """

    def __init__(self, path: Path | None = None, driver: Path = Path("/sys/module/nvidia")) -> None:
        self._path = path
        self._driver = driver
        self._lock = threading.Lock()
        self._sentences = self._read()

    def get(self, uuid: str) -> str:
        """The sentence about the device's fatal event; empty if none."""
        return self._sentences.get(uuid, "")

    def put(self, uuid: str, sentence: str) -> None:
        with self._lock:
            self._keep({**self._sentences, uuid: sentence})

    def drop(self, uuid: str) -> None:
        with self._lock:
            self._keep({name: text for name, text in self._sentences.items() if name != uuid})

    def clear(self) -> None:
        with self._lock:
            self._keep({})

    def _keep(self, sentences: dict[str, str]) -> None:
        if sentences == self._sentences:
            return
        self._sentences = sentences
        if self._path is None:
            return
        made = self._path.with_suffix(".new")
        try:
            made.write_text(json.dumps({"module": self._module(), "sentences": sentences}))
            made.replace(self._path)
        except OSError as error:
            log.warning(LogEvent.DEVICE_NOTICE, why=f"fatal events are not kept for the next start: {error}")

    def _read(self) -> dict[str, str]:
        if self._path is not None:
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                kept = json.loads(self._path.read_text())
                if kept["module"] == self._module():
                    return {str(uuid): str(sentence) for uuid, sentence in kept["sentences"].items()}
        return {}

    def _module(self) -> int:
        """Identifies the loaded module; 0 if the driver is no module, as on a simulated node."""
        with suppress(OSError):
            return self._driver.stat().st_ino
        return 0
