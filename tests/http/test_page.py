"""The page loads no external resource, escapes all text, draws bars to scale, and works in a browser."""

import asyncio
import re
import subprocess
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from tests.conditions import browser, needs
from tests.http.test_server import Known, observe, policy
from tests.metrics.samples import NODE, observation
from tests.metrics.samples import A as DEVICE_A
from tests.ports import free_port
from vgpud.model.device import ComputeInstance, Health, Placement
from vgpud.model.observation import Observation
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import State, SuspendedProcess, Way
from vgpud.model.view import NodeDescription
from vgpud.serve.http.bars import WIDTH, colours, device_bar
from vgpud.serve.http.doors import Doors
from vgpud.serve.http.history import MOST_TENANTS, SAMPLE_SECONDS, History
from vgpud.serve.http.page import CONTENT_SECURITY_POLICY, page


def test_the_page_loads_no_external_resource() -> None:
    html = page(observation(), "node1")
    assert not re.search(r"https?:|//|<script|<img|<link|<iframe|\son\w+=|\sstyle=|url\(|@import", html)


def test_the_content_security_policy_allows_nothing_but_the_style_of_the_page() -> None:
    style = re.search(r"<style>(.*)</style>", page(observation(), "node1"), re.DOTALL)
    assert style is not None
    digest = b64encode(sha256(style[1].encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in CONTENT_SECURITY_POLICY
    assert "default-src 'none'" in CONTENT_SECURITY_POLICY
    assert "unsafe" not in CONTENT_SECURITY_POLICY


def test_text_of_tenants_is_escaped() -> None:
    html = page(observation(), "<h1>host")
    for raw in ("<script", "<h1>host", "off the bus <b>", "allocation <made>", 'NVIDIA "H200"'):
        assert raw not in html
    assert "off the bus &lt;b&gt;" in html
    assert "SIMULATED" in html


def test_mig_instances_are_drawn_to_scale() -> None:
    """Of eight memory slices the instances have 0 and 4 to 7: an eighth at the left, and the right half."""
    seen = observation()
    bar = device_bar(seen.devices[1], seen)
    drawn = re.findall(r"<rect class=(\w+) x=([\d.]+) width=([\d.]+)", bar)
    assert drawn[0] == ("idle", "0.0", f"{WIDTH / 8:.1f}")
    assert drawn[1][1:] == (f"{WIDTH / 2:.1f}", f"{WIDTH / 2:.1f}")
    assert drawn[1][0].startswith("c")
    assert "allocation bbbb00000001" in bar


def test_the_parts_of_a_divided_instance_are_drawn_beside_each_other() -> None:
    """The three compute slices of the instance at the right are divided into compute instances of one and of
    two slices.
    """
    seen = observation()
    view = seen.devices[1]
    mig = view.device.mig
    places = (Placement(0, 1), Placement(1, 2))
    parts = tuple(ComputeInstance(n, n, f"MIG-{n}", at) for n, at in enumerate(places))
    divided = replace(mig.instances[1], compute_instances=parts, slice_count=3)
    device = replace(view.device, mig=replace(mig, instances=(divided,)))
    bar = device_bar(replace(view, device=device), seen)
    drawn = re.findall(r"<rect class=\w+ x=([\d.]+) width=([\d.]+)", bar)
    sixth = WIDTH / 6
    assert drawn == [(f"{3 * sixth:.1f}", f"{sixth:.1f}"), (f"{4 * sixth:.1f}", f"{2 * sixth:.1f}")]


def test_preload_slices_are_drawn_to_scale_with_their_use() -> None:
    seen = observation()
    bar = device_bar(seen.devices[0], seen)
    (width,) = re.findall(r"<rect class=c\d x=0.0 width=([\d.]+)", bar)
    assert float(width) == pytest.approx(WIDTH * 4 / 141, abs=0.1)
    (used,) = re.findall(r"<rect class=used x=0.0 y=\d+ width=([\d.]+)", bar)
    assert float(used) == pytest.approx(float(width) * 3 / 4, abs=0.1)


def test_the_page_shows_a_lost_device_and_says_if_there_is_no_hardware() -> None:
    seen = observation()
    assert "class=lost" in device_bar(seen.devices[2], seen)
    described = NodeDescription(NODE, 0, 1, "", "0 devices", 1.0, "the nvidia kernel driver is not loaded")
    bare = page(replace(seen, described=described, devices=(), allocations=(), events=()), "node1")
    assert "the nvidia kernel driver is not loaded" in bare


def test_the_page_says_that_the_arbiter_does_not_answer() -> None:
    seen = observation()
    described = replace(seen.described, arbiter_error="vgpu-arbiter does not answer")
    html = page(replace(seen, described=described), "node1")
    assert "<p class=bad>vgpu-arbiter does not answer</p>" in html


def test_eight_allocations_on_a_device_have_different_colours() -> None:
    first = observation().allocations[0]
    many = [replace(first, id=f"{number:012x}", created_unix_ns=number) for number in range(8)]
    assert len(set(colours(many).values())) == 8


def test_a_user_is_shown_by_name_where_the_host_has_one() -> None:
    uid = observation().allocations[0].request.owner.uid
    assert f"alice ({uid})" in page(observation(), "node1", names={uid: "alice"})
    assert f"uid {uid}" in page(observation(), "node1")


def with_memory_used(seen: Observation, used_bytes: int) -> Observation:
    """The observation reduced to one device, on which this much memory is in use."""
    view = seen.devices[0]
    device = replace(view.device, memory_used_bytes=used_bytes)
    return replace(seen, devices=(replace(view, device=device),))


def test_memory_that_no_tenant_uses_is_shown_as_outside_vgpud() -> None:
    """The only tenant of the device uses 3 GiB. The rest of the memory in use is outside vgpud."""
    seen = with_memory_used(observation(), 8 * GIB)
    assert "8GiB used · 5GiB outside vgpud" in page(seen, "node1")
    x, width = re.findall(
        r"<rect class=outside x=([\d.]+) width=([\d.]+)", device_bar(seen.devices[0], seen)
    )[0]
    assert float(width) == pytest.approx(WIDTH * 5 / 141, abs=0.1)
    assert float(x) + float(width) == pytest.approx(WIDTH, abs=0.1)
    alone = replace(seen, allocations=())
    assert "8GiB used · 8GiB outside vgpud" in page(alone, "node1")
    assert "class=outside x=" not in page(with_memory_used(seen, 3 * GIB + 1), "node1"), "the driver's own"


def test_memory_of_a_suspended_tenant_is_shown_as_on_the_host() -> None:
    """Of the tenant's 3 GiB, 1 GiB stays on the device."""
    seen = observation()
    saved = SuspendedProcess(7, 1, 2 * GIB, Way.SWAP, stays_bytes=GIB)
    asleep = replace(seen.allocations[0], state=State.SUSPENDED, suspended=(saved,))
    html = page(replace(seen, allocations=(asleep,)), "node1")
    assert "1GiB / 4GiB<br>2GiB on the host" in html
    (width,) = re.findall(r"<rect class=c\d x=0.0 width=([\d.]+)", html)
    (used,) = re.findall(r"<rect class=used x=0.0 y=\d+ width=([\d.]+)", html)
    assert float(used) == pytest.approx(float(width) / 4, abs=0.1)


def test_the_tenants_of_a_sick_device_are_drawn() -> None:
    seen = observation()
    device = replace(seen.devices[0].device, health=Health.SICK, health_reason="rows wait for a reset")
    html = page(replace(seen, devices=(replace(seen.devices[0], device=device),)), "node1")
    assert "sick: rows wait for a reset" in html
    assert "<rect class=c0 x=0.0" in html


def test_bars_tenants_and_events_link_to_each_other() -> None:
    html = page(observation(), "node1")
    for name in ("d0", "aaaa00000001"):
        assert len(re.findall(rf"<\w+[^>]* id={name}>", html)) == 1
    assert "<a href='#aaaa00000001'><title>" in html, "from the bar to the tenant"
    assert "<a href=#d0>0</a>" in html, "from the tenant to its device"
    gone = replace(observation(), allocations=())
    assert "href='#aaaa00000001'" not in page(gone, "node1")


def test_events_name_devices_by_short_uuids_and_link_to_tenants() -> None:
    sentence = f"allocation aaaa00000001: preload on {DEVICE_A} for uid 1000"
    events = (replace(observation().events[0], sentence=sentence),)
    html = page(replace(observation(), events=events), "node1")
    link = "<a href='#aaaa00000001'>aaaa00000001</a>"
    assert f"<td>allocation {link}: preload on GPU-aaaaaaaa for uid 1000</td>" in html


def test_the_history_draws_the_last_hour_of_devices_and_tenants() -> None:
    history = History()
    seen = observation()
    device, tenant = seen.devices[0].device.uuid, seen.allocations[0].id
    history.add(seen, 0.0)
    assert history.drawn(device, 1000, 36) == ""
    for number in range(1, 200):
        history.add(seen, number * SAMPLE_SECONDS)
    drawn = history.drawn(device, 1000, 36)
    (busy,) = re.findall("class=busy points='([^']*)'", drawn)
    assert len(busy.split()) == 120
    assert busy.split()[-1] == f"1000.0,{35 - 0.87 * 34:.1f}", "the device is busy for 87 %"
    assert history.drawn(tenant, 120, 20).count("class=past") == 1
    history.add(replace(seen, allocations=()), 6000.0)
    assert history.drawn(tenant, 120, 20) == ""
    history.clear()
    assert history.drawn(device, 1000, 36) == ""


def test_the_history_is_bounded_and_drawn_once_a_sample() -> None:
    history = History()
    seen = observation()
    first = seen.allocations[0]
    many = replace(seen, allocations=tuple(replace(first, id=f"a{number}") for number in range(1000)))
    for number in range(2):
        history.add(many, number * SAMPLE_SECONDS)
    assert sum(history.drawn(one.id, 120, 20) != "" for one in many.allocations) == MOST_TENANTS
    assert history.drawn("a0", 120, 20) is history.drawn("a0", 120, 20)


@needs("chromium")
def test_a_browser_draws_the_page_without_errors(tmp_path: Path) -> None:
    program = browser()
    assert program is not None
    port = free_port()
    (tmp_path / "private").mkdir()

    async def run() -> tuple[str, str]:
        doors = Doors(tmp_path, observe, Known())
        await doors.start(policy(page=port))
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"),
                f"http://127.0.0.1:{port}/",
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            out, err = await asyncio.wait_for(process.communicate(), 300)
        finally:
            doors.close()
        return out.decode(), err.decode()

    dom, log = asyncio.run(run())
    assert "<h2>Devices</h2>" in dom
    # svg elements of the legend, the devices and the allocations
    assert dom.count("<svg") == 7 + 3 + 2 * 2
    assert "Content Security Policy" not in log
    assert "CONSOLE" not in log
