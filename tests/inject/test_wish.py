"""Requests of containers, from annotations and environment."""

from difflib import get_close_matches
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpud.inject import wish
from vgpud.inject.wish import KEYS, Wish, check_pod_asks, ignored_by, owner_of, pod_of, wish_of
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB, Percent
from vgpud.model.tenancy import Isolation, Owner, Selector


def container(annotations: dict[str, Any] | None = None, env: list[str] | None = None) -> dict[str, Any]:
    return {"annotations": annotations, "process": {"env": env or ["PATH=/bin"], "user": {}}}


def test_every_request_key_is_read_from_annotations_and_environment() -> None:
    words = {
        "memory": "8GiB",
        "cores": "30",
        "count": "2",
        "isolation": "quota",
        "profile": "1g.18gb",
        "device": "0, GPU-12",
        "device-name": "*H200*",
        "label": "train",
    }
    assert words.keys() == KEYS.keys()
    expected = Wish(
        memory_bytes=8 * GIB,
        share=Percent(3000),
        count=2,
        isolation=Isolation.QUOTA,
        mig_profile="1g.18gb",
        selector=Selector(uuids=("GPU-12",), indices=(0,), name_glob="*H200*"),
        label="train",
    )
    assert wish_of(container({f"vgpud.io/{key}": value for key, value in words.items()})) == expected
    env = [f"VGPU_{key.upper().replace('-', '_')}={value}" for key, value in words.items()]
    assert wish_of(container(env=env), environment=True) == expected
    assert wish_of(container(env=env)) is None


@pytest.mark.parametrize(
    "asks_nothing",
    [
        {},
        {"process": None, "annotations": None},
        container(),
        container(env=["VGPU_MEMORY=", "VGPU_LEASE=/x", "VGPU_SIM_STATE=/y", "MY_VGPU_MEMORY=1GiB", "X"]),
        container({"vgpud.io/label": "no more than a name"}),
        container({"vgpud.io/prepared": "a1", "other.io/memory": "1GiB"}),
        container(env=["VGPU_COUNT=0"]),
        # a container that names an allocation already has that allocation by its CDI device
        container(env=["VGPU_ALLOCATION=a1", "VGPU_MEMORY=1GiB"])
        | {"linux": {"devices": [{"path": "/dev/nvidia0"}]}},
        container(env=["VGPU_ALLOCATION=a1", "VGPU_MEMORY=1GiB"])
        | {"mounts": [{"source": "/run/vgpud/leases/a1"}]},
        # a pod's pause container makes no request
        container({"vgpud.io/memory": "1GiB", "io.kubernetes.cri.container-type": "sandbox"}),
        container({"vgpud.io/memory": "1GiB", "io.kubernetes.cri-o.ContainerType": "sandbox"}),
    ],
)
def test_a_container_without_a_request_gets_no_allocation(asks_nothing: dict[str, Any]) -> None:
    assert wish_of(asks_nothing, environment=True) is None
    assert ignored_by(asks_nothing, environment=True) == ()


def test_a_containers_state_names_its_pod() -> None:
    cri, crio = "io.kubernetes.cri.", "io.kubernetes."
    containerd = {f"{cri}sandbox-namespace": "ns", f"{cri}sandbox-name": "p", f"{cri}container-name": "c"}
    of_crio = {f"{crio}pod.namespace": "ns", f"{crio}pod.name": "p", f"{crio}container.name": "c"}
    for annotations in (containerd, of_crio):
        assert pod_of({"annotations": annotations}) == "ns/p/c"
        assert pod_of({"annotations": {**annotations, next(iter(annotations)): 7}}) == ""
        assert pod_of({"annotations": {**annotations, next(iter(annotations)): "x" * 300}}) == ""
    assert pod_of({}) == ""


@pytest.mark.parametrize("environment", [False, True])
def test_variables_of_an_image_neither_add_to_annotations_nor_cancel_them(environment: bool) -> None:
    """An attack: the image sets ENV VGPU_ALLOCATION, so that its container starts without the operator's
    limit, perhaps with a device node from the operator.
    """
    image = ["VGPU_MEMORY=100GiB", "VGPU_CORES=30", "VGPU_ALLOCATION=x"]
    for more in ({}, {"linux": {"devices": [{"path": "/dev/nvidia0"}]}}):
        config = container({"vgpud.io/memory": "1GiB"}, image) | more
        assert wish_of(config, environment) == Wish(memory_bytes=GIB)
        assert ignored_by(config, environment) == ("VGPU_MEMORY", "VGPU_CORES", "VGPU_ALLOCATION")


def test_the_variable_vgpu_allocation_counts_only_beside_a_lease_or_a_device_node() -> None:
    """An image can set the variable. A container of a pod would then run without a slice and without an
    error.
    """
    config = container(env=["VGPU_MEMORY=1GiB", "VGPU_ALLOCATION=x"])
    assert wish_of(config, environment=True) == Wish(memory_bytes=GIB)
    pod = container({"io.kubernetes.cri.container-type": "container"}, ["VGPU_ALLOCATION=x"])
    with pytest.raises(VgpuError, match="asks for no GPU slice"):
        check_pod_asks(pod)
    for proof in (
        {"mounts": [{"source": "/run/vgpud/leases/x"}]},
        {"linux": {"devices": [{"path": "/dev/nvidia0"}]}},
    ):
        assert wish_of(config | proof, environment=True) is None
        check_pod_asks(pod | proof)
    bare = container(env=["VGPU_MEMORY=1GiB"]) | {"linux": {"devices": [{"path": "/dev/nvidia0"}]}}
    assert wish_of(bare, environment=True) == Wish(memory_bytes=GIB)


@pytest.mark.parametrize(
    ("variables", "gib"),
    [
        (["NVIDIA_GPU_MEMORY_LIMIT=2048"], 2),
        (["NVIDIA_GPU_MEMORY_REQUEST=1024"], 1),
        (["NVIDIA_GPU_MEMORY_REQUEST=1024", "NVIDIA_GPU_MEMORY_LIMIT=2048"], 2),
        (["NVIDIA_GPU_MEMORY_LIMIT=2048", "VGPU_MEMORY=3GiB"], 3),
    ],
)
def test_the_memory_limit_variable_of_nvidias_container_toolkit_counts_as_a_request(
    variables: list[str], gib: int
) -> None:
    """A number without a unit is in MiB, as the toolkit's CDI hook apply-cuda-memory-limits reads it."""
    config = container(env=variables)
    assert wish_of(config, environment=True) == Wish(memory_bytes=gib * GIB)
    assert wish_of(config) is None
    assert ignored_by(config) == (variables[-1].partition("=")[0],)


def test_variables_of_an_image_count_only_if_the_policy_allows() -> None:
    config = container(env=["VGPU_MEMORY=100GiB", "VGPU_LABEL=x"])
    assert wish_of(config) is None
    assert ignored_by(config) == ("VGPU_MEMORY", "VGPU_LABEL")
    assert wish_of(config, environment=True) is not None
    assert ignored_by(config, environment=True) == ()


@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        (container({"vgpud.io/memroy": "1GiB"}), ErrorCode.BAD_REQUEST, "unknown annotation"),
        (container({"VGPUD.io/memory": "1GiB"}), ErrorCode.BAD_REQUEST, "unknown annotation"),
        (container({"vgpud.io/Memory": "1GiB"}), ErrorCode.BAD_REQUEST, "unknown annotation"),
        (container({"vgpud.io/memory": None}), ErrorCode.BAD_REQUEST, "vgpud.io/memory is not a text"),
        (container({"vgpud.io/memory": "0m"}), ErrorCode.BAD_QUANTITY, "bad amount"),
        (container(env=["VGPU_MEMORY=-1GiB"]), ErrorCode.BAD_QUANTITY, "bad amount"),
        (container(env=["VGPU_CORES=0"]), ErrorCode.BAD_PERCENT, "bad share"),
        (container(env=["VGPU_COUNT=0", "VGPU_MEMORY=1GiB"]), ErrorCode.BAD_REQUEST, "count"),
        (container(env=["VGPU_COUNT=65"]), ErrorCode.BAD_REQUEST, "count"),
        (container(env=["VGPU_ISOLATION=strong"]), ErrorCode.BAD_REQUEST, "isolation"),
        (container(env=["VGPU_DEVICE=" + ",".join("9" * 65)]), ErrorCode.BAD_REQUEST, "65 devices"),
        (container(env=["VGPU_PROFILE=1g\x07"]), ErrorCode.BAD_REQUEST, "profile"),
        ({"annotations": ["vgpud.io/memory"]}, ErrorCode.BAD_REQUEST, "not an object"),
        ({"process": {"env": "VGPU_MEMORY=1GiB"}}, ErrorCode.BAD_REQUEST, "not a list"),
    ],
)
def test_a_container_whose_limit_cannot_be_parsed_is_refused(
    config: dict[str, Any], code: ErrorCode, said: str
) -> None:
    with pytest.raises(VgpuError, match=said) as refused:
        wish_of(config, environment=True)
    assert refused.value.code is code


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(("annotations", "process", "linux"), JSON))
    | st.fixed_dictionaries({"linux": st.fixed_dictionaries({"uidMappings": JSON, "gidMappings": JSON})})
)
def test_an_oci_config_of_any_shape_is_read_or_refused_as_a_bad_request(config: dict[str, Any]) -> None:
    for ask in (wish_of, owner_of):
        try:
            ask(config)
        except VgpuError as refused:
            assert refused.code is ErrorCode.BAD_REQUEST


def test_the_owner_is_the_uid_of_the_containers_process_on_the_host() -> None:
    user = {"uid": 1000, "gid": 100}
    config: dict[str, Any] = {"process": {"user": user}}
    assert owner_of(config) == Owner(1000, 100)
    mapping = [{"containerID": 0, "hostID": 200000, "size": 65536}]
    config["linux"] = {"uidMappings": mapping, "gidMappings": mapping}
    assert owner_of(config) == Owner(201000, 200100)
    assert owner_of({}) == Owner(0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"hostID": 2**33},
        # container id 1000 would be id 2**32 - 1 on the host, which means "no id"
        {"hostID": 2**32 - 1001},
        {"hostID": -1},
        {"hostID": float("inf")},
        {"containerID": -1},
        {"size": -1},
        {"size": 2**32},
    ],
)
def test_an_id_mapping_beyond_the_hosts_ids_is_refused(changes: dict[str, Any]) -> None:
    mapping = {"containerID": 0, "hostID": 200000, "size": 65536} | changes
    for key in ("uidMappings", "gidMappings"):
        with pytest.raises(VgpuError) as refused:
            owner_of({"process": {"user": {"uid": 1000, "gid": 1000}}, "linux": {key: [mapping]}})
        assert refused.value.code is ErrorCode.BAD_REQUEST


def test_a_user_namespace_that_maps_all_ids_keeps_the_uid() -> None:
    every = [{"containerID": 0, "hostID": 0, "size": 2**32 - 1}]
    config = {"process": {"user": {"uid": 2**32 - 2}}, "linux": {"uidMappings": every}}
    assert owner_of(config) == Owner(2**32 - 2, 0)


def test_the_refusal_of_an_annotation_with_a_very_long_name_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name may be as long as a config.json allows. The sentence, and the time to find a similar key, are
    bounded.
    """
    compared: list[str] = []

    def noted(word: str, *given: Any, **more: Any) -> list[str]:
        compared.append(word)
        return get_close_matches(word, *given, **more)

    monkeypatch.setattr(wish, "get_close_matches", noted)
    with pytest.raises(VgpuError) as refused:
        wish_of(container({"vgpud.io/" + "memory" * 100_000: "1GiB"}))
    assert len(refused.value.sentence) < 320
    assert "vgpud.io/ goes with memory" in refused.value.hint
    assert len(compared[0]) <= 32
