"""The operator's view of a whole daemon: metrics, the status page, quotas, and reloads that apply completely
or not at all.
"""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conditions import needs
from tests.demo.node import BUILD, DemoNode
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import eventually, simulate
from tests.ports import free_port
from vgpud.model.journal import Message

POLICY = """version = 1
[http]
listen = "127.0.0.1:{port}"
[[quota]]
uids = [{uid}]
max_memory = "10GiB"
max_allocations = 3
[[device]]
mode = "auto"
"""
OTHER = 4242


def figures(node: DemoNode) -> dict[str, list[tuple[dict[str, str], float]]]:
    connection = http.client.HTTPConnection("localhost", timeout=300)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(node.run_dir / "metrics.sock"))
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def page(port: int) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("GET", "/")
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    return free_port(), free_port()


@pytest.fixture(scope="module")
def node(make_shared_node: NodeMaker, ports: tuple[int, int]) -> DemoNode:
    made = make_shared_node(policy=POLICY.format(port=ports[0], uid=OTHER))
    made.start()
    return made


def rewrite(node: DemoNode, text: str) -> None:
    Path(node.environment["VGPUD_CONFIG"]).write_text(text)


def test_metrics_and_the_status_page_show_an_allocation(node: DemoNode, ports: tuple[int, int]) -> None:
    held = node.ctl("alloc", "--memory", "4GiB", "--cores", "25", "--isolation", "compute").stdout.strip()
    found = figures(node)
    assert found["vgpud_allocations"][1] == ({"state": "active"}, 1)
    (labels, limit) = found["vgpud_allocation_memory_limit_bytes"][0]
    assert (labels["allocation"], labels["uid"], limit) == (held, str(os.getuid()), 4 * 2**30)
    assert found["vgpud_allocation_compute_limit_ratio"][0][1] == 0.25
    assert found["vgpud_simulated"][0][1] == 1
    assert len(found["vgpud_gpu_temperature_celsius"]) == 8
    status, html = page(ports[0])
    assert status == 200
    assert held in html
    node.ctl("release", held)


@needs("root")  # gives a lease to another user
def test_a_users_quota_is_enforced_and_counted(node: DemoNode) -> None:
    other = ("--owner", f"{OTHER}:{OTHER}", "--isolation", "quota")
    first = node.ctl("alloc", "--memory", "6GiB", *other).stdout.strip()
    refused = node.ctl("alloc", "--memory", "6GiB", *other, check=False)
    assert refused.returncode == 34
    assert f"uid {OTHER} would hold 12GiB, and its quota is 10GiB (E204)" in refused.stderr
    planned = node.ctl("plan", "--memory", "6GiB", *other, check=False)
    assert planned.returncode == 34
    assert not re.search("^yes", planned.stdout, re.MULTILINE), "a refused plan takes no device"
    grown = node.ctl("resize", first, "--memory", "11GiB", check=False)
    assert grown.returncode == 34
    assert "would hold 11GiB" in grown.stderr
    node.ctl("resize", first, "--memory", "10GiB")
    refusals = {have["reason"]: count for have, count in figures(node)["vgpud_allocations_refused_total"]}
    # the refusals of a plan and of a resize are not counted as refused requests
    assert refusals == {"OVER_QUOTA": 1}
    node.ctl("release", first)


def test_a_reload_whose_port_is_in_use_changes_nothing(node: DemoNode, ports: tuple[int, int]) -> None:
    """A port in use makes the whole new policy invalid, just as a mistake in the file does."""
    before = node.ctl_json("policy", "show")["digest"]
    with socket.create_server(("127.0.0.1", ports[1])):
        rewrite(node, POLICY.format(port=ports[1], uid=OTHER + 1))
        refused = node.ctl("policy", "reload", check=False)
    assert refused.returncode == 78
    assert f"cannot listen on 127.0.0.1:{ports[1]}" in refused.stderr
    assert node.ctl_json("policy", "show")["digest"] == before
    assert page(ports[0])[0] == 200
    assert figures(node)["vgpud_config_last_reload_successful"] == [({}, 0)]
    wanted = [
        f"http.listen: 127.0.0.1:{ports[0]} becomes 127.0.0.1:{ports[1]}",
        "quotas changed, 1 rule: what is held stays held",
    ]
    assert node.ctl("policy", "diff", check=False).returncode == 1
    dry = node.ctl("policy", "reload", "--dry-run", "-o", "json", check=False)
    assert (dry.returncode, json.loads(dry.stdout)["done"]) == (1, wanted)
    assert page(ports[0])[0] == 200
    assert node.ctl_json("policy", "reload")["done"] == wanted
    assert node.ctl("policy", "diff").returncode == 0
    assert page(ports[1])[0] == 200
    with pytest.raises(ConnectionRefusedError):
        page(ports[0])
    assert figures(node)["vgpud_config_last_reload_successful"] == [({}, 1)]


def test_ps_why_top_and_metrics_show_a_tenants_process(node: DemoNode) -> None:
    probe = str(BUILD / "bin" / "vgpu-probe")
    options = ["--isolation", "quota", "--memory", "2GiB", "--label", "training"]
    tenant = node.tenant(options, [probe, "hold", str(512 * 2**20), "--then-wait-on-stdin"])
    try:
        tenant.line()
        pid = tenant.process.pid
        listed: list[dict[str, Any]] = []

        def is_listed() -> bool:
            """Returns whether `vgpuctl ps` lists the process with its memory. If vgpud did not wait for NVML,
            the listing has no figures of memory.
            """
            listed[:] = [p for p in node.ctl_json("ps")["items"] if p["pid"] == pid and p["memoryBytes"]]
            return listed != []

        eventually(is_listed, "the tenant's process is listed")
        (process,) = listed
        held = process["allocationId"]
        assert process["command"] == "vgpu-probe"
        assert process["memoryBytes"] >= 512 * 2**20
        why = node.ctl_json("why", str(pid))
        assert why["allocation"]["id"] == held
        assert any("no share was asked for" in sentence for sentence in why["limits"])
        (row,) = [row for row in node.ctl_json("top", "-1")["tenants"] if row["allocation"] == held]
        assert row["memoryUsedBytes"] >= 512 * 2**20
        assert row["processes"] == 1
        assert row["label"] == "training"
        (_, used) = next(s for s in figures(node)["vgpud_allocation_memory_used_bytes"])
        assert used >= 512 * 2**20
        assert node.ctl("doctor", check=False).returncode == 0
        kinds = [event["type"] for event in node.ctl_json("events", "--last", "1")["items"]]
        assert kinds == ["allocation_active"]
    finally:
        tenant.end()


def test_a_lost_device_is_shown_by_top_and_metrics(make_node: NodeMaker) -> None:
    """One of several devices is lost. The other devices stay healthy."""
    node = make_node("h100x8")
    node.start()
    simulate(node, "fault", "gpu-lost", "--device", "3")
    eventually(lambda: node.ctl_json("top", "-1")["devices"][3]["health"] == "lost", "device 3 is lost")
    rows = node.ctl_json("top", "-1")["devices"]
    assert [row["health"] for row in rows].count("ok") == 7
    shown = node.ctl("top", "-1").stdout
    assert "lost: " in shown
    assert node.ctl("doctor", check=False).returncode == 37
    well = {have["gpu"]: value for have, value in figures(node)["vgpud_gpu_healthy"]}
    assert well == {str(i): float(i != 3) for i in range(8)}
    node.ctl("alloc", "--memory", "4GiB", "--isolation", "quota")


def test_the_audit_trail_records_caller_action_and_outcome(node: DemoNode) -> None:
    held = node.ctl("alloc", "--memory", "1GiB", "--isolation", "quota", "--label", "audited").stdout.strip()
    node.ctl("release", held)
    reader = {**node.environment, "VGPUD_SOCKET": str(node.run_dir / "ro.sock")}
    asked = [sys.executable, "-m", "vgpud.ctl", "release", held]
    assert subprocess.run(asked, env=reader, capture_output=True, check=False, timeout=300).returncode == 4
    lines = [json.loads(line) for line in node.log.read_text().splitlines() if line.startswith("{")]
    trail = [line for line in lines if "audit" in line]
    made = next(line for line in trail if line.get("label") == "audited")
    assert (made["event"], made["message_id"]) == ("allocated", Message.ALLOCATED)
    assert (made["audit"], made["uid"]) == ("allocate", os.getuid())
    assert (made["door"], made["outcome"]) == ("admin", "done")
    assert made["pid"] > 0
    given = [line for line in trail if line["audit"] == "release"][-1]
    assert (given["outcome"], given["allocation"]) == ("done", held)
    refused = [line for line in trail if line["audit"] == "Release"][-1]
    assert (refused["outcome"], refused["door"]) == ("NOT_ALLOWED", "read")
    decided = next(line for line in lines if line["event"] == "allocated" and line.get("label") == "audited")
    assert decided["allocation"] == held
    assert decided["memory_bytes"] == 2**30
