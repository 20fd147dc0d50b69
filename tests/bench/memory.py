"""Memory that vgpud needs for its allocations. The unit's limits are based on it (tests/systemd)."""

import asyncio

from tests.bench.clients import Tenants
from tests.bench.common import Report
from tests.bench.node import BenchNode

_STEP = 1000


def run(most: int) -> Report:
    """Makes `most` allocations in steps of a thousand. After each step it lists all of them once, as vgpuctl
    does.
    """
    report = Report("memory")
    node = BenchNode()
    try:
        node.start()
        tenants = Tenants(node.tenant_socket)
        report.value("resident, nothing allocated", node.resident_mib(), "MiB")
        for held in range(_STEP, most + 1, _STEP):
            asyncio.run(tenants.take(_STEP))
            asyncio.run(tenants.states())
            report.value(f"resident, {held} allocations", node.resident_mib(), "MiB")
    finally:
        node.end()
    return report
