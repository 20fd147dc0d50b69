"""HAMi's manifests converted to vgpud's."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from vgpud.ctl.main import main

POD = """
apiVersion: v1
kind: Pod
metadata:
  name: train
  annotations:
    nvidia.com/use-gputype: "A100"
    nvidia.com/vgpu-mode: hami-core
    kept: "yes"
spec:
  schedulerName: hami-scheduler
  containers:
    - name: main
      image: example/train
      env: [{name: GPU_CORE_UTILIZATION_POLICY, value: force}, {name: MINE, value: "1"}]
      resources:
        limits: {nvidia.com/gpu: 2, nvidia.com/gpumem: 3000, nvidia.com/gpucores: 30, cpu: 4}
    - name: side
      image: example/side
"""


def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, *more: str) -> tuple[list[Any], str]:
    file = tmp_path / "in.yaml"
    file.write_text(text)
    assert main(["convert", "hami", str(file), *more]) == 0
    said = capsys.readouterr()
    return list(yaml.safe_load_all(said.out)), said.err


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, *more: str) -> str:
    file = tmp_path / "in.yaml"
    file.write_text(text)
    assert main(["convert", "hami", str(file), *more]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_a_manifest_of_hami_is_converted_to_the_runtime_class_vgpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (pod,), notes = run(capsys, tmp_path, POD)
    assert pod["metadata"]["annotations"] == {"kept": "yes"}
    spec = pod["spec"]
    assert spec["runtimeClassName"] == "vgpu" and "schedulerName" not in spec
    main_container, side = spec["containers"]
    assert {e["name"]: e["value"] for e in main_container["env"]} == {
        "MINE": "1",
        "VGPU_DEVICE_NAME": "*A100*",
        "VGPU_ISOLATION": "quota",
        "VGPU_MEMORY": "3000MiB",
        "VGPU_CORES": "30",
        "VGPU_COUNT": "2",
    }
    assert main_container["resources"] == {"limits": {"cpu": 4}}
    assert side == {"name": "side", "image": "example/side"}
    assert "GPU_CORE_UTILIZATION_POLICY is left out" in notes and "scheduler does not count" in notes


def test_a_manifest_of_hami_is_converted_to_extended_resources_of_vgpud(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (pod,), notes = run(capsys, tmp_path, POD, "--to", "kubelet")
    container = pod["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"cpu": 4, "vgpud.io/memory-gib": 6}
    assert "runtimeClassName" not in pod["spec"]
    for said in ("30 cores are left out", "rounded up to whole GiB", 'across = "even"', "device name"):
        assert said in notes


WHOLE = "{name: c, resources: {limits: {nvidia.com/gpu: 1}}}"


@pytest.mark.parametrize(("target", "asked"), [("runtime", "device"), ("kubelet", None)])
def test_a_whole_card_in_a_manifest_of_hami_is_converted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str, asked: str | None
) -> None:
    (pod,), _ = run(capsys, tmp_path, f"{{kind: Pod, spec: {{containers: [{WHOLE}]}}}}", "--to", target)
    (container,) = pod["spec"]["containers"]
    if asked is None:
        assert container["resources"]["limits"] == {"vgpud.io/gpu": 1}
    else:
        assert container["env"] == [{"name": "VGPU_ISOLATION", "value": asked}]
        assert "resources" not in container


PERCENT = (
    "{kind: Pod, spec: {containers: [{name: c, resources: {limits: {nvidia.com/gpumem-percentage: 50}}}]}}"
)


def test_a_percentage_of_memory_in_a_manifest_of_hami_needs_the_size_of_the_card(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "--card-memory" in refused(capsys, tmp_path, PERCENT)
    (pod,), _ = run(capsys, tmp_path, PERCENT, "--card-memory", "80GiB")
    assert pod["spec"]["containers"][0]["env"] == [{"name": "VGPU_MEMORY", "value": "40GiB"}]


@pytest.mark.parametrize(
    "carrier",
    [
        "{{kind: Deployment, spec: {{template: {{spec: {0}}}}}}}",
        "{{kind: CronJob, spec: {{jobTemplate: {{spec: {{template: {{spec: {0}}}}}}}}}}}",
        "{{kind: List, items: [{{kind: Job, spec: {{template: {{spec: {0}}}}}}}]}}",
        "{{kind: Service, spec: {{ports: []}}}}\n---\n{{kind: Pod, spec: {0}}}",
    ],
)
def test_every_kind_of_workload_in_a_manifest_of_hami_is_converted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, carrier: str
) -> None:
    text = carrier.format(f"{{containers: [{WHOLE}]}}")
    documents, _ = run(capsys, tmp_path, text)
    assert "VGPU_ISOLATION" in yaml.safe_dump_all(documents)
    assert "nvidia.com" not in yaml.safe_dump_all(documents)


def test_a_manifest_without_resources_of_hami_is_unchanged(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pod = "{kind: Pod, spec: {containers: [{name: c, resources: {limits: {cpu: 1}}}]}}"
    text = f"{pod}\n---\n{{kind: ConfigMap}}\n"
    documents, notes = run(capsys, tmp_path, text)
    assert documents == list(yaml.safe_load_all(text)) and notes == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "{kind: Pod, spec: {containers: [{resources: {limits: {nvidia.com/gpumem: 8Gi}}}]}}",
            "no whole number",
        ),
        (
            "{kind: Pod, metadata: {annotations: {nvidia.com/vgpu-mode: magic}}, spec: {containers: []}}",
            "magic",
        ),
        ("{", "not YAML"),
        ("a: 1\n---\nversion = 1\n", "document 2 of"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str
) -> None:
    assert said in refused(capsys, tmp_path, text)


def test_annotations_of_hami_without_a_counterpart_are_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    annotations = "{nvidia.com/nouse-gputype: T4, hami.io/gpu-scheduler-policy: spread}"
    text = (
        f"{{kind: Pod, metadata: {{name: p, annotations: {annotations}}}, spec: {{containers: [{WHOLE}]}}}}"
    )
    (pod,), notes = run(capsys, tmp_path, text)
    assert "annotations" not in pod["metadata"]
    assert "nodeSelector" in notes and "planner.strategy" in notes
