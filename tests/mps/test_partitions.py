"""Static SM partitions of NVIDIA's MPS (branch 590 and later), with a whole vgpud on a simulated node."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.demo.node import DemoNode
from tests.e2e.conftest import NodeMaker, node_maker
from tests.e2e.support import eventually, release
from tests.mps.test_node import QUICK, control_pid, control_pid_or_none, holding, result, share, sms, start
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.modes.mps.answers import Partitions
from vgpud.modes.mps.control import MpsControl

DIVIDED = f"{QUICK}static_partitions = true\n"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[NodeMaker]:
    with node_maker(tmp_path) as maker:
        yield maker


@pytest.fixture
def node(make: NodeMaker) -> DemoNode:
    made = make(policy=DIVIDED, driver="595")
    made.start()
    return made


def partitions(node: DemoNode, held: pb.Allocation) -> Partitions:
    pipe = Path(held.edits.host_env["CUDA_MPS_PIPE_DIRECTORY"])
    program = shutil.which("nvidia-cuda-mps-control", path=node.environment["PATH"])
    assert program is not None
    return MpsControl(program, pipe, node.folder).partitions()


def name_file(held: pb.Allocation) -> Path:
    """The file from which the guard reads the name of the tenant's partition."""
    return Path(held.edits.host_env["VGPU_MPS_TENANT"]) / "partition"


def test_tenants_with_static_partitions_have_multiprocessors_of_their_own(node: DemoNode) -> None:
    """An H200 has 16 chunks of 8 multiprocessors, and 4 multiprocessors that are in no chunk."""
    half, third = share(node, 2, 50), share(node, 2, 33)
    assert [sms(node, held) for held in (half, third)] == [64, 40]
    assert partitions(node, half).chunks == 16 and len(partitions(node, half).ids) == 2
    release(node, half.id)
    assert len(partitions(node, third).ids) == 1
    most = share(node, 2, 67)
    assert [sms(node, held) for held in (most, third)] == [80, 40]


def test_a_share_of_less_than_a_chunk_is_refused(node: DemoNode) -> None:
    with pytest.raises(VgpuError) as refused:
        share(node, 1, 5)
    assert refused.value.code is ErrorCode.UNSUPPORTED
    assert refused.value.sentence == "a share of 5 % is less than one of the 16 chunks of the device"
    assert sms(node, share(node, 1, 6.25)) == 8


def test_a_program_in_a_static_partition_that_drops_the_guard_gets_no_cuda(node: DemoNode) -> None:
    held = share(node, 2, 50)
    bare = start(node, held, "hold", "1MiB", extra={"LD_PRELOAD": "", "VGPU_MPS_TENANT": ""})
    assert bare.line()["result"] == "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"
    bare.end()
    assert result(node, held) == "held"


def test_static_partitions_are_there_again_after_a_restart_of_the_mps_daemon_or_vgpud(node: DemoNode) -> None:
    held, other = share(node, 2, 25), share(node, 2, 75)
    tenant = holding(node, held)
    names = [name_file(one).read_text() for one in (held, other)]
    node.kill()
    node.start()
    assert tenant.alive and len(partitions(node, held).ids) == 2
    assert [name_file(one).read_text() for one in (held, other)] == names
    first = control_pid(node)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: control_pid_or_none(node) not in (None, first), "the daemon is back")
    tenant.process.kill()
    tenant.process.communicate()
    assert [sms(node, one) for one in (held, other)] == [32, 96]
    assert len(partitions(node, held).ids) == 2


def test_an_mps_daemon_without_partitions_finds_no_partition_names_of_an_earlier_daemon(
    node: DemoNode,
) -> None:
    """A new MPS daemon may give the partition names of an earlier one to other tenants. Here the policy has
    changed, too.
    """
    held = share(node, 2, 50)
    assert sms(node, held) == 64 and name_file(held).exists()
    first = control_pid(node)
    node.kill()
    os.kill(first, signal.SIGKILL)
    Path(node.environment["VGPUD_CONFIG"]).write_text(QUICK)
    node.start()
    eventually(lambda: control_pid_or_none(node) not in (None, first), "the daemon is back")
    assert sms(node, held) == 66 and not name_file(held).exists()


def test_a_crash_leaves_no_static_partition_behind(make: NodeMaker) -> None:
    node = make(policy=DIVIDED, driver="595")
    for point in ("allocate.attach-0", "allocate.commit", "release.record-intent"):
        node.start()
        held = share(node, 1, 25)
        node.kill()
        node.start(fault_point=point)
        with pytest.raises(VgpuError):
            share(node, 1, 75, request_id=point)
            release(node, held.id)
        assert node.daemon is not None
        node.daemon.wait(timeout=300)
        node.start()
        again = share(node, 1, 75, request_id=point)
        assert sms(node, again) == 96, point
        assert len(partitions(node, again).ids) == len(states_of(node)), point
        release(node, *states_of(node))
        node.stop()


def states_of(node: DemoNode) -> list[str]:
    return [line for line in node.ctl("ls", "-o", "name").stdout.splitlines() if line]


def test_a_device_without_partitions_is_refused_with_the_reason(make: NodeMaker) -> None:
    node = make(policy=DIVIDED, driver="580")
    node.start()
    with pytest.raises(VgpuError) as refused:
        share(node, 2, 50)
    assert "has no static SM partitions (branch 590, Ampere)" in refused.value.sentence
