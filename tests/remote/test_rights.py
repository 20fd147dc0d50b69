"""The right to remote slices: tokens, certificates and the bounds of grants."""

import os
import pwd
import subprocess
from pathlib import Path

from tests.conditions import needs
from tests.lease.conftest import eventually as until
from tests.remote.clients import ended, opened, say
from tests.remote.node import CERTIFICATES, USER, RemoteNode

pytestmark = needs("root", "namespaces")


def test_a_token_with_a_wrong_secret_is_refused(remote: RemoteNode) -> None:
    number, secret, pin = remote.grant().split(".")
    for forged in (secret[::-1], "x" * 43):
        client = remote.client(f"{number}.{forged}.{pin}", "--memory", "1GiB")
        assert "(E201)" in ended(client)
        assert client.returncode == 4
    assert remote.held() == []


def test_revoked_and_expired_tokens_are_refused(remote: RemoteNode) -> None:
    revoked, expired = remote.grant(), remote.grant()
    remote.expire(expired)
    remote.node.ctl("remote", "revoke", revoked.split(".")[0])
    for token in (revoked, expired):
        assert "the grant was revoked or has expired (E201)" in ended(
            remote.client(token, "--memory", "1GiB")
        )


def test_a_client_sends_nothing_to_a_door_with_another_certificate(remote: RemoteNode) -> None:
    number, secret, pin = remote.grant().split(".")
    client = remote.client(f"{number}.{secret}.{'0' * len(pin)}", "--memory", "1GiB")
    assert "is not the one that the token names (E201)" in ended(client)
    # the only session process was the one that read the door's settings
    assert remote.sessions.processes[1:] == []


def test_a_client_certificate_opens_a_session_only_while_it_has_a_grant(remote: RemoteNode) -> None:
    remote.node.ctl("remote", "grant", USER, "--certificate", str(CERTIFICATES / "client.pem"))
    proof = ["--ca", str(CERTIFICATES / "door.pem")]
    for name, wanted in (("client", 0), ("foreign", 32)):
        files = [
            "--certificate",
            str(CERTIFICATES / f"{name}.pem"),
            "--key",
            str(CERTIFICATES / f"{name}.key"),
        ]
        client = remote.client("", "--memory", "1GiB", *files, *proof, command=["true"])
        errors = ended(client)
        assert client.returncode == wanted, errors
    remote.node.ctl("remote", "revoke", USER)
    files = ["--certificate", str(CERTIFICATES / "client.pem"), "--key", str(CERTIFICATES / "client.key")]
    assert "(E201)" in ended(remote.client("", "--memory", "1GiB", *files, *proof, command=["true"]))


def test_a_grant_bounds_the_sums_of_its_slices(remote: RemoteNode) -> None:
    token = remote.grant("--memory", "3GiB", "--cores", "40", "--sessions", "2")
    first = opened(remote, token, "--memory", "2GiB", "--cores", "20")
    for options, sentence in (
        (("--memory", "2GiB", "--cores", "10"), "would hold 4GiB, and may hold 3GiB"),
        (("--memory", "1GiB", "--cores", "30"), "would hold 50% of a device, and may hold 40%"),
    ):
        assert sentence in ended(remote.client(token, *options))
    second = opened(remote, token, "--memory", "1GiB", "--cores", "20")
    assert "has 2 sessions, and may have 2" in ended(remote.client(token, "--memory", "1GiB", "--cores", "1"))
    for client in (first, second):
        client.kill()
        ended(client)


def test_a_user_has_at_most_the_sessions_of_the_policy(short: RemoteNode) -> None:
    tokens = [short.grant() for _ in range(3)]
    clients = [opened(short, token, "--memory", "1GiB") for token in tokens[:2]]
    assert f"{USER} has 2 sessions, and may have 2" in ended(short.client(tokens[2], "--memory", "1GiB"))
    for client in clients:
        client.kill()
        ended(client)
    until(lambda: not short.held())


def test_a_grant_is_refused_before_the_door_has_a_certificate(remote: RemoteNode) -> None:
    (Path(remote.node.environment["VGPUD_CONFIG"]).parent / "remote" / "certificate.pem").unlink()
    refused = remote.node.ctl("remote", "grant", USER, check=False)
    assert (
        "vgpud-remote.service has no certificate yet, and a token contains the digest of it (E106)"
        in refused.stderr
    )
    assert f"make {remote.node.folder}/etc/remote/certificate.pem first" in refused.stderr
    assert remote.node.ctl_json("remote", "grants")["grants"] == []


def test_a_local_allocation_with_a_label_like_a_sessions_does_not_count_towards_a_grant(
    remote: RemoteNode,
) -> None:
    token = remote.grant("--sessions", "1", user="65534")
    forged = f"remote 65534/{token.split('.')[0]} 127.0.0.1"
    remote.node.ctl("alloc", "--memory", "1GiB", "--label", forged)
    name = subprocess.run(["id", "-nu", "65534"], capture_output=True, text=True, check=False).stdout.strip()
    remote.node.ctl("alloc", "--memory", "1GiB", "--label", forged.replace("65534", name or "65534", 1))
    client = opened(remote, token, "--memory", "1GiB")
    client.kill()
    ended(client)


def test_the_bounds_of_a_grant_apply_to_the_planned_slice_and_not_to_the_request(remote: RemoteNode) -> None:
    token = remote.grant("--memory", "4GiB")
    for asked, planned in (
        (("hardware", "--memory", "1GiB"), "16GiB with MIG profile 1g.18gb"),
        (("device",), "139.8GiB with a whole device"),
    ):
        refused = ended(remote.client(token, "--isolation", *asked))
        assert f"would hold {planned}, and may hold 4GiB" in refused
    assert "allocation_" not in remote.node.ctl("events", "-o", "json").stdout


def test_a_request_without_sizes_takes_the_bounds_of_its_grant(remote: RemoteNode) -> None:
    token = remote.grant("--memory", "3GiB", "--cores", "40")
    first = opened(remote, token)
    (part,) = remote.held()[0].slices
    assert (part.memory_bytes, part.share_percent) == (3 << 30, 40)
    refused = ended(remote.client(token, "--cores", "10"))
    assert "would hold 6GiB, and may hold 3GiB (E204)" in refused
    assert "hint: ask for less (left out, --memory counts as 3GiB and --cores counts as 40), or" in refused
    first.kill()
    ended(first)


def test_a_new_session_checks_the_account_of_its_grant_again(remote: RemoteNode) -> None:
    token, account = remote.grant(), pwd.getpwnam(USER)
    free = next(uid for uid in range(64000, 65000) if not _has_account(uid))
    for uid, sentence in (
        (free, f"is for uid {free}, which has no account on the node (E205)"),
        (0, "is for root, who may open vgpud's sockets (E201)"),
    ):
        remote.rewrite(token, uid=uid, gid=64999)
        assert sentence in ended(remote.client(token, "--memory", "1GiB"))
    remote.rewrite(token, uid=account.pw_uid)
    os.chown(remote.node.run_dir / "vgpud.sock", -1, account.pw_gid)
    assert f"is for {USER}, who may open vgpud's sockets (E201)" in ended(
        remote.client(token, "--memory", "1GiB")
    )
    assert remote.held() == []


def test_the_server_of_a_session_runs_in_the_present_group_of_its_account(remote: RemoteNode) -> None:
    token, account = remote.grant(), pwd.getpwnam(USER)
    remote.rewrite(token, gid=account.pw_gid + 1)
    client = opened(remote, token, "--memory", "1GiB")
    assert say(client, "gid") == str(account.pw_gid)
    client.kill()
    ended(client)


def _has_account(uid: int) -> bool:
    try:
        return bool(pwd.getpwuid(uid))
    except KeyError:
        return False


def test_the_server_of_a_session_has_no_supplementary_groups(remote: RemoteNode, tmp_path: Path) -> None:
    groups, account = tmp_path / "group", pwd.getpwuid(65534).pw_name
    groups.write_text(f"{Path('/etc/group').read_text()}vgpu-of-test:x:64999:{account}\n")
    own = f'mount --bind {groups} /etc/group && exec "$@"'
    remote.sessions.before = ["unshare", "--mount", "sh", "-c", own, "sh"]
    client = opened(remote, remote.grant(user="65534"), "--memory", "1GiB")
    assert say(client, "groups") == ""
    client.kill()
    ended(client)
