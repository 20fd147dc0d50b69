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
        self._sentences: dict[str, str] = {}
        self._asked: frozenset[str] = frozenset()  # devices for which NVML asked for a repair
        self._read()

    def get(self, uuid: str) -> str:
        """The sentence about the device's fatal event; empty if none."""
        return self._sentences.get(uuid, "")

    def put(self, uuid: str, sentence: str) -> None:
        with self._lock:
            self._keep({**self._sentences, uuid: sentence})

    def note(self, uuid: str, asked: bool) -> None:
        """Notes whether NVML asks for a repair of the device. If NVML has asked before and asks no more, the
        device was repaired, perhaps while vgpud was stopped, and its sentence is dropped.
        """
        with self._lock:
            if asked:
                self._keep(self._sentences, self._asked | {uuid})
            elif uuid in self._asked:
                self._keep(self._without(uuid))

    def drop(self, uuid: str) -> None:
        with self._lock:
            self._keep(self._without(uuid))

    def clear(self) -> None:
        with self._lock:
            self._keep({})

    def _without(self, uuid: str) -> dict[str, str]:
        return {name: text for name, text in self._sentences.items() if name != uuid}

    def _keep(self, sentences: dict[str, str], asked: frozenset[str] | None = None) -> None:
        asked = (self._asked if asked is None else asked).intersection(sentences)
        if (sentences, asked) == (self._sentences, self._asked):
            return
        self._sentences, self._asked = sentences, asked
        if self._path is None:
            return
        made = self._path.with_suffix(".new")
        text = json.dumps({"module": self._module(), "sentences": sentences, "asked": sorted(asked)})
        try:
            made.write_text(text)
            made.replace(self._path)
        except OSError as error:
            log.warning(LogEvent.FATAL_DEVICE_ERRORS_NOT_SAVED, why=str(error))

    def _read(self) -> None:
        if self._path is not None:
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                kept = json.loads(self._path.read_text())
                if kept["module"] == self._module():
                    asked = frozenset(kept.get("asked", ()))
                    self._sentences = {str(uuid): str(text) for uuid, text in kept["sentences"].items()}
                    self._asked = asked.intersection(self._sentences)

    def _module(self) -> int:
        """Identifies the loaded module; 0 if the driver is no module, as on a simulated node."""
        with suppress(OSError):
            return self._driver.stat().st_ino
        return 0
