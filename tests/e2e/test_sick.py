"""A device for which NVML asks for a repair: it is closed, emptied or only reported, and takes tenants again
after the repair.
"""

import pytest

from tests.conditions import needs
from tests.demo.node import DemoNode
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import PROBE, client, eventually, quota, release, simulate, states
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError

POLICY = """version = 1
[[device]]
mode = "auto"
on_sick = "{rule}"
"""
QUOTA = ["--isolation", "quota", "--memory", "2GiB", "--device", "0"]
HOLD = [PROBE, "hold", "64MiB", "--then-wait-on-stdin"]


def device(node: DemoNode, index: int = 0) -> pb.Device:
    with client(node) as calls:
        return calls.list_devices().devices[index]


def break_it(node: DemoNode, what: str = "recovery", code: int = 1) -> None:
    simulate(node, "fault", what, "--device", "0", "--code", str(code))


def told(node: DemoNode, reason: str) -> list[str]:
    """The sentences of the events that contain the reason."""
    with client(node) as calls:
        return [one.sentence for one in calls.list_events().events if reason in one.sentence]


def start(make_node: NodeMaker, rule: str) -> DemoNode:
    node = make_node(policy=POLICY.format(rule=rule))
    node.start()
    return node


@pytest.mark.parametrize(
    ("what", "code", "reason"),
    [
        pytest.param("recovery", 1, "NVML asks for a reset of the device", marks=needs("driver-580")),
        pytest.param(
            "recovery",
            4,
            "NVML asks for a drain of its peer-to-peer traffic and a reset of the device",
            marks=needs("driver-580"),
        ),
        ("rows-failed", 1, "a remapping of its memory failed: replace the card"),
    ],
)
def test_a_sick_device_gets_no_new_tenants_and_keeps_its_own(
    make_node: NodeMaker, what: str, code: int, reason: str
) -> None:
    node = start(make_node, "drain")
    tenant = node.tenant(QUOTA, HOLD)
    tenant.line()
    break_it(node, what, code)
    eventually(lambda: device(node).health == "sick", "the next snapshot shows it")
    assert device(node).health_reason == reason
    with pytest.raises(VgpuError) as refused:
        quota(node)
    assert refused.value.code is ErrorCode.RESET_NEEDED and reason in refused.value.sentence
    eventually(lambda: "is sick" in str(told(node, reason)), "watchers are told")
    assert len(told(node, reason)) == 1
    assert device(node, 1).health == "ok" and tenant.alive and set(states(node).values()) == {"active"}
    assert f"sick: {reason}" in node.ctl("status", check=False).stdout
    tenant.end()


@needs("driver-580")
def test_a_sick_device_takes_tenants_again_after_its_reset(make_node: NodeMaker) -> None:
    node = start(make_node, "drain")
    break_it(node)
    eventually(lambda: device(node).health == "sick", "the next snapshot shows it")
    simulate(node, "reset", "0")
    eventually(lambda: device(node).health == "ok", "it is well again")
    release(node, quota(node).id)


@needs("driver-580")
def test_tenants_of_a_sick_device_move_away_by_themselves(make_node: NodeMaker) -> None:
    """NVML's event alone makes vgpud move the tenants; no call asks for it."""
    node = start(make_node, "move")
    tenant = node.tenant(QUOTA, HOLD)
    tenant.line()
    uuid = device(node).uuid
    break_it(node)

    def is_away() -> bool:
        with client(node) as calls:
            (held,) = calls.list_allocations().allocations
        return held.slices[0].device_uuid != uuid and held.state == "active"

    eventually(is_away, "the tenant is on another device")
    assert tenant.end()[0] == 0


@needs("driver-580")
def test_under_a_policy_that_only_reports_a_sick_device_still_takes_tenants(make_node: NodeMaker) -> None:
    node = start(make_node, "report")
    break_it(node)
    eventually(lambda: device(node).health_reason, "the next snapshot shows it")
    assert device(node).health == "ok"
    release(node, quota(node).id)
    assert "NVML asks for a reset" in node.ctl("doctor", check=False).stdout
    assert f"\nnotice:  device 0 ({device(node).uuid}): NVML asks for a reset" in node.ctl("status").stdout


def test_memory_rows_that_wait_for_a_reset_do_not_make_a_device_sick(make_node: NodeMaker) -> None:
    node = start(make_node, "drain")
    break_it(node, "rows-pending", 2)
    eventually(lambda: device(node).health_reason, "the next snapshot shows it")
    assert device(node).health == "ok"
    assert device(node).health_reason == "rows of its memory are remapped at its next reset"


@needs("driver-580")
def test_a_device_that_is_sick_at_the_start_of_vgpud_is_sick_until_its_reset(make_node: NodeMaker) -> None:
    node = make_node(policy=POLICY.format(rule="drain"))
    break_it(node)
    node.start()
    assert device(node).health == "sick"
    simulate(node, "reset", "0")
    eventually(lambda: device(node).health == "ok", "it is well again")
