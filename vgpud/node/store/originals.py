"""The original settings of devices that vgpud has changed. The ledger keeps them until they are restored."""

from collections.abc import Iterable

from vgpud.ledger import Ledger, Original


class LedgerOriginals:
    """Implements modes.base.Originals with the ledger. Reads are served from a copy in memory."""

    def __init__(self, ledger: Ledger, known: Iterable[Original]) -> None:
        self._ledger = ledger
        self._known = {(o.device_uuid, o.key): o.value for o in known}

    async def remember(self, device_uuid: str, key: str, value: str) -> None:
        if (device_uuid, key) not in self._known:
            await self._ledger.record_original(device_uuid, key, value)
            self._known[device_uuid, key] = value

    def recall(self, device_uuid: str, key: str) -> str | None:
        return self._known.get((device_uuid, key))

    def keys(self, device_uuid: str) -> tuple[str, ...]:
        return tuple(key for uuid, key in self._known if uuid == device_uuid)

    async def drop(self, device_uuid: str, key: str) -> None:
        if self._known.pop((device_uuid, key), None) is not None:
            await self._ledger.drop_original(device_uuid, key)
