"""The status page: one document without scripts and without external resources."""

import re
from base64 import b64encode
from collections.abc import Mapping, Set
from datetime import UTC, datetime
from hashlib import sha256
from html import escape
from types import MappingProxyType
from typing import NamedTuple

from vgpud.model.device import Health
from vgpud.model.event import Event
from vgpud.model.marks import shown_state
from vgpud.model.observation import Observation
from vgpud.model.quantity import show_bytes
from vgpud.model.tenancy import ANYONE, Allocation, Slice, State
from vgpud.model.view import DeviceView, SliceMeter, Vitals, on_device_bytes
from vgpud.serve.http.bars import colours, device_bar, outside_bytes, use_bar
from vgpud.serve.http.history import History

REFRESH_SECONDS = 5
_EVENTS = 20
_NO_VITALS = Vitals()
_LONG_UUID = re.compile(r"\b(GPU-[0-9a-f]{8})-[0-9a-f-]{27}\b")

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:1.5rem auto;max-width:75rem;padding:0 1rem;
background:#fff;color:#1c2024}
h1{font-size:1.35rem;margin:0 0 .25rem}h2{font-size:1.05rem;margin:1.6rem 0 .5rem}
p{margin:.2rem 0}.dim{color:#5d6670}.bad{color:#b3261e;font-weight:600}
.sim{background:#fff3c4;border:1px solid #d9b430;padding:.4rem .7rem;border-radius:.3rem}
.card{margin:.7rem 0 1rem}.card svg{width:100%;height:auto;display:block;margin-top:.2rem}
table{border-collapse:collapse;width:100%}th{text-align:left;font-weight:600;color:#5d6670}
th,td{padding:.25rem .7rem .25rem 0;border-bottom:1px solid #e3e6e9;vertical-align:middle}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}code{font-size:.92em}
td svg{width:120px;height:12px;vertical-align:middle}
td svg.key{width:14px;height:14px;margin-left:0}td svg.past{height:20px}
.card svg.past{height:22px;margin-top:2px}.memory{fill:#b8c4d0}
.busy{fill:none;stroke:#b3541e;stroke-width:1.5;
vector-effect:non-scaling-stroke}.key{display:inline-block;width:14px;height:14px;vertical-align:-2px;
margin:0 .3rem 0 .9rem}.wide{overflow-x:auto}.tenants td,.item{white-space:nowrap}
a{color:inherit}tr:target,.card:target{background:#fff3c4}
@media(max-width:45rem){.card svg{height:30px}.card svg text{display:none}.card code{display:none}
thead{display:none}tr{display:flex;flex-wrap:wrap;gap:.1rem .8rem;padding:.4rem 0;
border-bottom:1px solid #e3e6e9}
th,td,td.n{border:0;padding:0;text-align:left}td:empty{display:none}
.events td:last-child,.tenants td:first-child{flex-basis:100%;overflow-wrap:anywhere}
.tenants td:nth-child(5)::before{content:"device "}.tenants td:nth-child(7)::before{content:"share "}
.tenants td:nth-child(8)::before{content:"waited "}.tenants td:nth-child(9)::before{content:"refused "}
.tenants td:nth-child(10)::before{content:"processes "}}
svg text{font:11px system-ui,sans-serif;fill:#1c2024}
.room{fill:#eef0f2}.line{stroke:#fff;stroke-width:2}.idle{fill:#cfd5da}.lost{fill:#f3c9c6}
.c0{fill:#9cc9ee}.c1{fill:#f6c28b}.c2{fill:#a9d9a4}.c3{fill:#d3b5e5}.c4{fill:#f2aeb5}
.c5{fill:#9fdcd6}.c6{fill:#e9dc7a}.c7{fill:#cfe39a}.outside{fill:#8b939b}.used{fill:#1c2024;opacity:.28}
@media(prefers-color-scheme:dark){body{background:#15181b;color:#e4e7ea}th,.dim{color:#9aa4ad}
.room{fill:#2a2f34}.line{stroke:#15181b}.sim{background:#4a3d08}th,td{border-color:#30363c}
.memory{fill:#4a5a6a}.busy{stroke:#ffb27a}.idle{fill:#444c54}svg text{fill:#101214}
tr:target,.card:target{background:#4a3d08}
svg .on-room{fill:#e4e7ea}.bad{color:#ff8a80}}
"""

CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{b64encode(sha256(STYLE.encode()).digest()).decode()}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(
    seen: Observation,
    hostname: str,
    history: History | None = None,
    names: Mapping[int, str] = MappingProxyType({}),
) -> str:
    """The HTML document. All text from tenants is escaped. `names` maps uids to the names of users."""
    shown = _Shown(seen, history or History(), names, colours(seen.allocations))
    vitals = seen.metered.vitals
    by_id = {allocation.id: allocation for allocation in seen.allocations}
    devices = "".join(_device(view, vitals.get(view.device.uuid, _NO_VITALS), shown) for view in seen.devices)
    rows = "".join(_tenant(by_id[name], shown) for name in sorted(by_id))
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f"<meta http-equiv=refresh content={REFRESH_SECONDS}>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>vgpud on {escape(hostname)}</title><style>{STYLE}</style></head><body>"
        f"{_head(seen, hostname)}<h2>Devices</h2>{_LEGEND}{devices or '<p class=dim>none</p>'}"
        f"<h2>Tenants</h2>{_tenants(rows)}<h2>Events</h2><div class=wide>{_events(seen)}</div>{_DOCS}"
        "</body></html>\n"
    )


class _Shown(NamedTuple):
    """The data from which the rows are made. `styles` maps the id of each allocation to its CSS colour."""

    seen: Observation
    history: History
    names: Mapping[int, str]
    styles: Mapping[str, str]

    def owner(self, allocation: Allocation) -> str:
        uid = allocation.request.owner.uid
        if uid == ANYONE:
            return "any (a pod's)"
        return f"{self.names[uid]} ({uid})" if self.names.get(uid) else f"uid {uid}"


def _key(style: str, text: str) -> str:
    return f"<span class=item><svg class=key viewBox='0 0 14 14'>{style}</svg>{text}</span>"


_SWATCH = "<rect class={} width=14 height=14 />"
_LEGEND = (
    "<p class=dim>"
    + " ".join(
        (
            _key(_SWATCH.format("c0"), "a tenant, by its limit"),
            _key(_SWATCH.format("c0") + "<rect class=used y=9 width=14 height=5 />", "what of it is in use"),
            _key(_SWATCH.format("idle"), "an idle MIG instance"),
            _key(_SWATCH.format("outside"), "memory outside vgpud"),
            _key(_SWATCH.format("room"), "free"),
            _key(_SWATCH.format("memory"), "memory in the last hour"),
            _key("<polyline class=busy points='0,11 5,3 9,9 14,4' />", "compute in the last hour"),
        )
    )
    + "</p>"
)


_DOCS = (
    "<p class=dim><code>vgpuctl why ALLOCATION</code> says how a tenant got what it has, and what limits it; "
    "<code>vgpuctl doctor</code>, what is wrong with the node. Manuals: <code>man vgpuctl</code>, "
    "<code>/usr/share/doc/vgpud</code></p>"
)


def _head(seen: Observation, hostname: str) -> str:
    described = seen.described
    node = described.node
    lines = [f"<h1>vgpud on {escape(hostname)}</h1>"]
    if node.simulated:
        lines.append("<p class=sim>SIMULATED: no real GPU is behind this daemon</p>")
    wrong = filter(None, (described.hardware_error, described.arbiter_error))
    lines += [f"<p class=bad>{escape(sentence)}</p>" for sentence in wrong]
    facts = f"{described.status} · vgpud {seen.version} · driver {node.driver_version or 'none'}"
    lines.append(f"<p class=dim>{escape(facts)} · {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC</p>")
    return "".join(lines)


def _device(view: DeviceView, vitals: Vitals, shown: _Shown) -> str:
    device = view.device
    mode = "idle" if view.mode is None else view.mode.value
    usable = show_bytes(max(0, device.memory_usable_bytes))
    engine = "" if view.engine is None or view.mode is None else f", engine {view.engine.engine.value}"
    facts = [
        mode + engine + (", drained" if view.drained else ""),
        f"{show_bytes(view.memory_allocated_bytes)} of {usable} allocated",
        f"{show_bytes(device.memory_used_bytes)} used",
    ]
    if outside := outside_bytes(device, shown.seen):
        facts.append(f"{show_bytes(outside)} outside vgpud")
    if vitals.busy_percent is not None:
        facts.append(f"{vitals.busy_percent}% busy")
    if vitals.temperature_celsius is not None:
        facts.append(f"{vitals.temperature_celsius} °C")
    if vitals.power_milliwatts is not None:
        facts.append(f"{vitals.power_milliwatts // 1000} W")
    bad = ""
    if device.health is not Health.OK:
        bad = f" <span class=bad>{device.health.value}: {escape(device.health_reason)}</span>"
    return (
        f"<section class=card id=d{device.index}><b>{device.index}</b> {escape(device.name)} "
        f"<code class=dim>{escape(device.uuid)}</code> "
        f"<span class=dim>{escape(' · '.join(facts))}</span>{bad}"
        f"{device_bar(view, shown.seen, shown.styles)}{shown.history.drawn(device.uuid, 1000, 36)}</section>"
    )


def _tenants(rows: str) -> str:
    if not rows:
        return "<p class=dim>none</p>"
    heads = "".join(
        f"<th{' class=n' if right else ''}>{text}</th>"
        for text, right in (
            ("Allocation", False),
            ("Owner", False),
            ("State", False),
            ("Mode", False),
            ("Device", True),
            ("Memory", False),
            ("Share", True),
            ("Waited", True),
            ("Refused", True),
            ("Processes", True),
            ("Last hour", False),
            ("Label", False),
        )
    )
    return (
        f"<div class=wide><table class=tenants><thead><tr>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _tenant(allocation: Allocation, shown: _Shown) -> str:
    meters = shown.seen.metered.meters.get(allocation.id, ())
    rows = []
    for at, part in enumerate(allocation.slices):
        rows.append(_slice(allocation, part, meters[at] if at < len(meters) else None, shown))
    return "".join(rows)


def _slice(allocation: Allocation, part: Slice, meter: SliceMeter | None, shown: _Shown) -> str:
    style = shown.styles[allocation.id]
    device = shown.seen.described.node.device(part.device_uuid)
    memory = show_bytes(part.memory_bytes)
    if meter is not None:
        used = on_device_bytes(allocation, meter)
        memory = f"{use_bar(used, part.memory_bytes, style)} {show_bytes(used)} / {memory}"
        if allocation.state is State.SUSPENDED:
            memory += f"<br>{show_bytes(max(0, meter.memory_used_bytes - used))} on the host"
    waited = meter.compute.waited_ns if meter is not None and meter.compute is not None else None
    refused = (meter.refusals_limit, meter.refusals_card) if meter is not None else (None, None)
    known = [count for count in refused if count is not None]
    mode = part.mode.value if part.mig is None else f"{part.mode.value} {part.mig.profile_name}"
    state, request = shown_state(allocation, shown.seen.marks), allocation.request
    cells = (
        ("", f"{_key(_SWATCH.format(style), '')}<code>{escape(allocation.id)}</code>"),
        ("", escape(shown.owner(allocation))),
        ("bad" if allocation.failure else "", escape(f"{state} {allocation.failure}".strip())),
        ("", escape(mode)),
        ("n", f"<a href=#d{device.index}>{device.index}</a>" if device is not None else "?"),
        ("", memory),
        ("n", str(part.share) if part.share is not None else ""),
        ("n", f"{waited / 1e9:.1f} s" if waited else ""),
        ("n", str(sum(known)) if known else ""),
        ("n", str(meter.processes) if meter is not None else ""),
        ("", shown.history.drawn(allocation.id, 120, 20)),
        ("", escape(", ".join(filter(None, (request.label, request.workload.pod_path))))),
    )
    row = "".join(f"<td class='{kind}'>{text}</td>" if kind else f"<td>{text}</td>" for kind, text in cells)
    mark = f" id={escape(allocation.id)}" if part is allocation.slices[0] else ""
    return f"<tr{mark}>{row}</tr>"


def _events(seen: Observation) -> str:
    latest = seen.events[-_EVENTS:][::-1]
    present = {allocation.id for allocation in seen.allocations}
    rows = "".join(
        f"<tr><td class=n>{event.revision}</td>"
        f"<td>{datetime.fromtimestamp(event.unix_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S}</td>"
        f"<td>{escape(event.kind.value)}</td><td>{_sentence(event, present)}</td></tr>"
        for event in latest
    )
    none = "<p class=dim>none since the start</p>"
    return f"<table class=events><tbody>{rows}</tbody></table>" if rows else none


def _sentence(event: Event, present: Set[str]) -> str:
    """The event's sentence, with devices by short UUIDs, and a link to its tenant while that is present."""
    text = escape(_LONG_UUID.sub(r"\1", event.sentence))
    name = event.subject
    return text.replace(name, f"<a href='#{name}'>{name}</a>", 1) if name in present else text
