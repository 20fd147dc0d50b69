"""The encoded bytes of the kubelet's messages: the published field numbers, decoded by hand and not with
vgpud's .proto files.
"""

import pytest
from google.protobuf.message import Message

from vgpud.api.gen.kubelet import deviceplugin_v1beta1_pb2 as dp
from vgpud.api.gen.kubelet import dra_health_pb2 as health
from vgpud.api.gen.kubelet import dra_v1_pb2 as dra
from vgpud.api.gen.kubelet import dra_v1beta1_pb2 as beta
from vgpud.api.gen.kubelet import pluginregistration_v1_pb2 as registration
from vgpud.api.gen.kubelet import podresources_v1_pb2 as pr


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field of less than 128 bytes (protobuf's encoding guide)."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def entry(number: int, key: bytes, value: bytes) -> bytes:
    return field(number, field(1, key) + field(2, value))


CLAIM = field(1, field(1, b"ns") + field(2, b"uid") + field(3, b"name"))
PREPARED = entry(
    1,
    b"uid",
    field(1, field(1, b"r") + field(2, b"pool") + field(3, b"dev") + field(4, b"v/c=n")) + field(2, b"no"),
)
ALLOCATED = (
    entry(1, b"K", b"V")
    + field(2, field(1, b"/c") + field(2, b"/h") + b"\x18\x01")
    + field(3, field(1, b"/c") + field(2, b"/h") + field(3, b"rw"))
    + field(5, field(1, b"v/c=n"))
)
KNOWN: list[tuple[Message, bytes]] = [
    (
        health.NodeWatchResourcesResponse(
            devices=[
                health.DeviceHealth(
                    device=health.DeviceIdentifier(pool_name="p", device_name="d"),
                    health=health.UNHEALTHY,
                    last_updated_time=7,
                    message="m",
                )
            ]
        ),
        field(1, field(1, field(1, b"p") + field(2, b"d")) + b"\x10\x02\x18\x07" + field(5, b"m")),
    ),
    (
        dp.RegisterRequest(
            version="v1beta1",
            endpoint="e",
            resource_name="r",
            options=dp.DevicePluginOptions(get_preferred_allocation_available=True),
        ),
        field(1, b"v1beta1") + field(2, b"e") + field(3, b"r") + field(4, b"\x10\x01"),
    ),
    (
        dp.ListAndWatchResponse(
            devices=[dp.Device(ID="i", health="Healthy", topology=dp.TopologyInfo(nodes=[dp.NUMANode(ID=1)]))]
        ),
        field(1, field(1, b"i") + field(2, b"Healthy") + field(3, field(1, b"\x08\x01"))),
    ),
    (
        dp.PreferredAllocationRequest(
            container_requests=[
                dp.ContainerPreferredAllocationRequest(
                    available_deviceIDs=["a"], must_include_deviceIDs=["m"], allocation_size=2
                )
            ]
        ),
        field(1, field(1, b"a") + field(2, b"m") + b"\x18\x02"),
    ),
    (
        dp.PreferredAllocationResponse(
            container_responses=[dp.ContainerPreferredAllocationResponse(deviceIDs=["a"])]
        ),
        field(1, field(1, b"a")),
    ),
    (
        dp.AllocateRequest(container_requests=[dp.ContainerAllocateRequest(devices_ids=["a", "b"])]),
        field(1, field(1, b"a") + field(1, b"b")),
    ),
    (
        dp.AllocateResponse(
            container_responses=[
                dp.ContainerAllocateResponse(
                    envs={"K": "V"},
                    mounts=[dp.Mount(container_path="/c", host_path="/h", read_only=True)],
                    devices=[dp.DeviceSpec(container_path="/c", host_path="/h", permissions="rw")],
                    cdi_devices=[dp.CDIDevice(name="v/c=n")],
                )
            ]
        ),
        field(1, ALLOCATED),
    ),
    (
        pr.ListPodResourcesResponse(
            pod_resources=[
                pr.PodResources(
                    name="p",
                    namespace="n",
                    containers=[
                        pr.ContainerResources(
                            name="c",
                            devices=[pr.ContainerDevices(resource_name="r", device_ids=["a"])],
                            dynamic_resources=[pr.DynamicResource(claim_name="cl", claim_namespace="ns")],
                        )
                    ],
                )
            ]
        ),
        field(
            1,
            field(1, b"p")
            + field(2, b"n")
            + field(
                3,
                field(1, b"c")
                + field(2, field(1, b"r") + field(2, b"a"))
                + field(5, field(2, b"cl") + field(3, b"ns")),
            ),
        ),
    ),
    (
        registration.PluginInfo(type="DRAPlugin", name="d", endpoint="/e", supported_versions=["v1"]),
        field(1, b"DRAPlugin") + field(2, b"d") + field(3, b"/e") + field(4, b"v1"),
    ),
    (registration.RegistrationStatus(plugin_registered=True, error="e"), b"\x08\x01" + field(2, b"e")),
    *(
        (
            version.NodePrepareResourcesRequest(
                claims=[version.Claim(namespace="ns", uid="uid", name="name")]
            ),
            CLAIM,
        )
        for version in (dra, beta)
    ),
    *(
        (
            version.NodePrepareResourcesResponse(
                claims={
                    "uid": version.NodePrepareResourceResponse(
                        devices=[
                            version.Device(
                                request_names=["r"],
                                pool_name="pool",
                                device_name="dev",
                                cdi_device_ids=["v/c=n"],
                            )
                        ],
                        error="no",
                    )
                }
            ),
            PREPARED,
        )
        for version in (dra, beta)
    ),
    *(
        (
            version.NodeUnprepareResourcesResponse(
                claims={"uid": version.NodeUnprepareResourceResponse(error="no")}
            ),
            entry(1, b"uid", field(1, b"no")),
        )
        for version in (dra, beta)
    ),
]


@pytest.mark.parametrize(("message", "known"), KNOWN, ids=lambda v: type(v).__name__)
def test_kubelet_messages_match_the_published_fields(message: Message, known: bytes) -> None:
    assert message.SerializeToString(deterministic=True) == known


def test_the_kubelets_grpc_services_have_the_published_names_and_methods() -> None:
    names = {
        service.full_name: sorted(service.methods_by_name)
        for module in (dp, pr, registration, dra, beta)
        for service in module.DESCRIPTOR.services_by_name.values()
    }
    node = ["NodePrepareResources", "NodeUnprepareResources"]
    assert names == {
        "v1beta1.Registration": ["Register"],
        "v1beta1.DevicePlugin": [
            "Allocate",
            "GetDevicePluginOptions",
            "GetPreferredAllocation",
            "ListAndWatch",
            "PreStartContainer",
        ],
        "v1.PodResourcesLister": ["List"],
        "pluginregistration.Registration": ["GetInfo", "NotifyRegistrationStatus"],
        "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin": node,
        "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin": node,
    }
