"""The one table of vgpuctl's verbs. It names the functions without importing them, so that help is fast."""

from typing import NamedTuple

from vgpud.ctl import arguments as kinds
from vgpud.ctl.arguments import Argument, argument

ANY_OUTPUT = ("table", "wide", "json", "yaml", "name")
ISOLATIONS = ("hardware", "compute", "quota", "device")


class Verb(NamedTuple):
    """A verb. `function` is "module:name" below vgpud.ctl, and takes (Namespace, Terminal) and returns the
    exit code.
    """

    name: str
    help: str
    function: str
    arguments: tuple[Argument, ...] = ()
    outputs: tuple[str, ...] = ANY_OUTPUT
    default_output: str = "table"
    details: str = ""
    streams: bool = False  # the verb prints documents until it is interrupted
    takes_command: bool = False  # the arguments after "--" are the command line of another program
    examples: tuple[str, ...] = ()  # example command lines for --help and the manual page


class Group(NamedTuple):
    """A first word, such as `policy`, that has verbs of its own."""

    name: str
    help: str
    verbs: tuple[Verb, ...]


ALLOCATION = argument(
    "allocation", metavar="ALLOCATION", help="an allocation's id, or its first characters (4 or more)"
)

DEVICES = argument(
    "device",
    nargs="+",
    metavar="UUID|INDEX",
    help="devices: an index, a UUID, or the first characters of a UUID",
)

LIMITS = (
    argument("--memory", type=kinds.memory, metavar="SIZE", help="per slice, as in 4GiB or 80GB"),
    argument("--cores", type=kinds.cores, metavar="PERCENT", help="share of each device's compute, as in 30"),
)

WANTED = (
    *LIMITS,
    argument(
        "--count", type=kinds.count, metavar="N", help="slices, each on a device of its own (default 1)"
    ),
    argument(
        "--isolation",
        type=kinds.isolation,
        choices=ISOLATIONS,
        help="hardware (by mig), compute (mps), quota (preload), device (exclusive); default: by policy",
    ),
    argument("--profile", metavar="NAME", help="a MIG profile, as in 1g.18gb"),
    argument(
        "--device",
        action="append",
        metavar="UUID|INDEX",
        help="only this device; repeat to allow several",
    ),
    argument(
        "--priority",
        choices=("above-normal", "normal", "below-normal"),
        help="quota: which tenant gets the next turn; compute: a hint to the driver (no above-normal)",
    ),
    argument("--device-name", metavar="GLOB", help="only devices whose product name matches"),
    argument("--label", metavar="TEXT", help="shown in listings"),
    argument(
        "-f",
        "--request",
        metavar="FILE",
        help='a TOML file with these options by name, as in memory = "4GiB"; options go before it',
    ),
)

WATCHED = argument("-w", "--watch", action="store_true", help="draw it again every 2 seconds")

OWNED = (
    argument("--owner", type=kinds.owner, metavar="UID:GID", help="allocate for another user (root only)"),
)

MIG_DEVICES = (
    argument(
        "--device",
        action="append",
        metavar="UUID|INDEX",
        help="only this device; repeat for several (default: all that MIG can partition)",
    ),
)
MIG_LAYOUT = (
    argument(
        "layout",
        nargs="*",
        metavar="LAYOUT",
        help="profiles, as in 3g.71gb@4 1g.18gb*2; or all-balanced, all-PROFILE, none, off, auto",
    ),
    *MIG_DEVICES,
    argument("--file", metavar="FILE", help="take the layout from a configuration of mig-parted"),
    argument("--config", metavar="NAME", help="which one of the file"),
)

HOST = argument("host", metavar="HOST[:PORT]", help="the GPU node (port 14843 if not said)")

PROOF = (
    argument(
        "--token-file", metavar="FILE", help="default VGPU_REMOTE_TOKEN, else ~/.config/vgpud/remote-token"
    ),
    argument("--certificate", metavar="FILE", help="a client certificate in place of a token"),
    argument("--key", metavar="FILE", help="its key"),
    argument("--ca", metavar="FILE", help="the authority that signed the node's certificate"),
)

VERBS: tuple[Verb | Group, ...] = (
    Verb(
        "status",
        "show the state of the daemon and its devices",
        "read:status",
        details="Exits 0 if all is well, and 37 if NVML, the arbiter, a device or an allocation has failed.",
        examples=("vgpuctl status",),
    ),
    Verb(
        "devices",
        "list the devices",
        "read:devices",
        (WATCHED,),
        examples=(
            "vgpuctl devices",
            "vgpuctl devices -o json",
        ),
    ),
    Verb(
        "alloc",
        "allocate slices and print the allocation's id",
        "change:alloc",
        (
            *WANTED,
            *OWNED,
            argument("--request-id", metavar="ID", help="the same id gets the same allocation again"),
        ),
        (*ANY_OUTPUT, "env"),
        "name",
        details='eval "$(vgpuctl alloc --memory 4GiB -o env)" puts this shell into the allocation.',
        examples=(
            "vgpuctl alloc --memory 8GiB --cores 25",
            "vgpuctl alloc --profile 1g.18gb --label notebook",
            "vgpuctl alloc --memory 4GiB --device 0 --device 1 -o json",
            "vgpuctl alloc -f notebook.toml --label mine",
        ),
    ),
    Verb(
        "release",
        "give allocations back",
        "change:release",
        (
            argument(
                "allocation",
                nargs="+",
                metavar="ALLOCATION",
                help="an allocation's id, or its first characters (4 or more)",
            ),
            argument("--force", action="store_true", help="also while its processes run (root only)"),
        ),
        examples=(
            "vgpuctl release 4f2a91c07be3",
            "vgpuctl release --force 4f2a 91c0",
        ),
    ),
    Verb(
        "resize",
        "change the limits of an allocation",
        "change:resize",
        (ALLOCATION, *LIMITS),
        examples=("vgpuctl resize 4f2a --memory 12GiB --cores 50",),
    ),
    Verb(
        "pause",
        "stop an allocation's work on its devices; its memory stays there",
        "change:pause",
        (ALLOCATION,),
        details="Takes a millisecond: the engine cut keeps it off. Its processes run on until they wait for "
        "their work. Only for mode preload on devices with the engine cut (docs/pool.md).",
        examples=("vgpuctl pause 4f2a",),
    ),
    Verb(
        "unpause",
        "let a paused allocation's work go on",
        "change:unpause",
        (ALLOCATION,),
        examples=("vgpuctl unpause 4f2a",),
    ),
    Verb(
        "suspend",
        "take an allocation's memory off its devices until it is resumed",
        "change:suspend",
        (
            ALLOCATION,
            argument(
                "--deep",
                action="store_true",
                help="leave nothing on the devices: the driver saves what libvgpu cannot evict, contexts too",
            ),
        ),
        details="All its processes wait meanwhile, at their next CUDA call. libvgpu copies evictable memory "
        "(docs/pool.md) as fast as the bus; the driver takes some seven seconds for 16 GiB: then give a long "
        "--timeout. vgpud goes on if the call is cut short.",
        examples=("vgpuctl suspend 4f2a", "vgpuctl suspend 4f2a --deep --timeout 300"),
    ),
    Verb(
        "resume",
        "let a suspended allocation go on",
        "change:resume",
        (ALLOCATION,),
        examples=("vgpuctl resume 4f2a",),
    ),
    Verb(
        "move",
        "move an allocation to another device of the same kind",
        "move:move",
        (
            ALLOCATION,
            argument(
                "--to",
                action="append",
                required=True,
                metavar="UUID|INDEX",
                help="the device to go to; repeat for each slice, in order",
            ),
            argument("--from", dest="source", metavar="UUID|INDEX", help="the device of the slice to move"),
        ),
        details="Its processes wait meanwhile, and find their memory as it was. Give a long --timeout for "
        "many GiB: vgpud goes on if the call is cut short.",
        examples=(
            "vgpuctl move 4f2a --to 3",
            "vgpuctl move 4f2a --from 0 --to GPU-8f29b814",
        ),
    ),
    Verb(
        "defrag",
        "move preload tenants so that a request fits, or a device is free",
        "move:defrag",
        (
            *LIMITS,
            argument(
                "--device",
                action="append",
                metavar="UUID|INDEX",
                help="make room on this device; repeat to allow several",
            ),
            argument("--dry-run", action="store_true", help="only say what would move"),
        ),
        details="Without --memory and --cores, a device is freed of preload tenants. vgpud makes the fewest "
        "moves, up to four at once.",
        examples=(
            "vgpuctl defrag --memory 60GiB --dry-run",
            "vgpuctl defrag --device 2",
        ),
    ),
    Verb(
        "ls",
        "list the allocations",
        "read:ls",
        (
            argument("--mine", action="store_true", help="only those of the calling user"),
            argument(
                "--user", type=kinds.uid, metavar="USER", help="only those of this user, by name or number"
            ),
            argument(
                "--label", metavar="GLOB", help="only those whose column LABEL matches, as in 'train-*'"
            ),
            argument("--pod", metavar="GLOB", help="only those of pods that match, as in 'team/web-*'"),
            argument("--device", metavar="UUID|INDEX", help="only those with a slice of this device"),
            WATCHED,
        ),
        details="With several conditions, allocations that meet all of them are listed.",
        examples=(
            "vgpuctl ls",
            "vgpuctl ls -o wide",
            "vgpuctl ls --mine --device 0",
            "vgpuctl ls --pod 'team/*'",
        ),
    ),
    Verb(
        "show",
        "show one allocation and what it uses",
        "read:show",
        (ALLOCATION,),
        examples=("vgpuctl show 4f2a",),
    ),
    Verb(
        "explain",
        "say why an allocation got its devices: the decision on each device, as it was made",
        "read:explain",
        (ALLOCATION,),
        details="'vgpuctl why' has this, and what limits the allocation now.",
        examples=("vgpuctl explain 4f2a",),
    ),
    Verb(
        "plan",
        "say what alloc would do, changing nothing",
        "change:plan",
        (*WANTED, *OWNED),
        examples=(
            "vgpuctl plan --memory 90GiB",
            "vgpuctl plan --isolation hardware --memory 30GiB",
        ),
    ),
    Verb(
        "run",
        "run a command in a new allocation",
        "run:run",
        (
            *WANTED,
            argument("command", nargs="...", metavar="-- COMMAND", help="the command and its arguments"),
        ),
        outputs=("table",),
        details="The command replaces vgpuctl in the same process, which keeps exit code and signals; "
        "the allocation ends with it.",
        takes_command=True,
        examples=(
            "vgpuctl run --memory 4GiB -- python train.py",
            "vgpuctl run --memory 8GiB --cores 30 --label inference -- ./server --port 8000",
            "vgpuctl run --isolation hardware --memory 16GiB -- ./server",
        ),
    ),
    Group(
        "policy",
        "check, show, explain, compare, test or reload the policy",
        (
            Verb(
                "check",
                "check a policy file; needs no daemon",
                "policy:check",
                (argument("file", metavar="FILE", help="a TOML file"),),
                examples=("vgpuctl policy check /etc/vgpud/vgpud.toml",),
            ),
            Verb(
                "show",
                "show the policy in force",
                "policy:show",
                (
                    argument("--origin", action="store_true", help="say which file and line set each key"),
                    argument("--file", metavar="FILE", help="show this file instead; needs no daemon"),
                ),
                examples=("vgpuctl policy show --origin",),
            ),
            Verb(
                "explain",
                "say what the policy in force means for each device, and for a user",
                "policy_explain:explain",
                (
                    argument("--device", metavar="UUID|INDEX", help="only this device"),
                    argument(
                        "--user",
                        type=kinds.uid,
                        metavar="USER",
                        help="the quota of this user, by name or number (default: the calling user)",
                    ),
                ),
                examples=("vgpuctl policy explain --device 0", "vgpuctl policy explain --user 1000"),
            ),
            Verb(
                "diff",
                "say what differs between the policy in force and the files",
                "policy:diff",
                (
                    argument(
                        "file", nargs="?", metavar="FILE", help="this file alone, not those of this host"
                    ),
                ),
                details="Exits 0 when nothing differs and 1 when something does.",
                examples=("vgpuctl policy diff",),
            ),
            Verb(
                "test",
                "try cases against a policy, changing nothing",
                "policy_cases:test",
                (
                    argument("cases", metavar="CASES", help="a TOML file of cases, see vgpuctl(1)"),
                    argument("--file", metavar="FILE", help="this policy alone, not the files of this host"),
                ),
                details="Exits 1 when a case fails.",
                examples=("vgpuctl policy test cases.toml --file new.toml",),
            ),
            Verb(
                "reload",
                "make the daemon read its policy again",
                "policy:reload",
                (argument("--dry-run", action="store_true", help="only say what would change"),),
                details="With --dry-run, exits 0 when nothing would change and 1 when something would.",
                examples=(
                    "vgpuctl policy reload --dry-run",
                    "vgpuctl policy reload",
                ),
            ),
        ),
    ),
    Group(
        "mps",
        "list MPS control daemons, end a client",
        (
            Verb(
                "ls",
                "list control daemons, servers and clients",
                "mps:ls",
                details="Exits 37 when a daemon does not answer or a server is in FAULT.",
                examples=("vgpuctl mps ls -o wide",),
            ),
            Verb(
                "terminate",
                "end one client without harm to the others",
                "mps:terminate",
                (
                    argument("client", type=kinds.pid, metavar="PID", help="a client's pid"),
                    argument(
                        "--device",
                        metavar="UUID|INDEX",
                        help="the device, if the process is a client on several",
                    ),
                ),
                examples=("vgpuctl mps terminate 31337",),
            ),
        ),
    ),
    Group(
        "mig",
        "see and lay out MIG instances",
        (
            Verb(
                "ls",
                "list instances, their holders, and what more fits",
                "mig:ls",
                MIG_DEVICES,
                examples=("vgpuctl mig ls --device 0",),
            ),
            Verb(
                "plan",
                "say what apply would do, changing nothing",
                "mig:plan",
                MIG_LAYOUT,
                details="Exits 35 if tenants block the layout, and names them.",
                examples=("vgpuctl mig plan 3g.71gb@4 1g.18gb*4 --device 0",),
            ),
            Verb(
                "apply",
                "give devices a layout, changing as few instances as possible",
                "mig:apply",
                MIG_LAYOUT,
                details="The layout is kept from then on, across reboots, until 'apply auto' lets instances "
                "come and go with the requests again. Interrupted, vgpud goes on with it.",
                examples=(
                    "vgpuctl mig apply all-balanced --device 0 --device 1",
                    "vgpuctl mig apply auto",
                ),
            ),
            Verb(
                "assert",
                "exit 0 if devices have a layout, 1 if not",
                "mig:check",
                MIG_LAYOUT,
                examples=("vgpuctl mig assert all-1g.18gb --device 0",),
            ),
            Verb(
                "export",
                "print the present instances as a configuration of mig-parted",
                "mig:export",
                (*MIG_DEVICES, argument("--config", metavar="NAME", help="its name (default current)")),
                outputs=("table", "json", "yaml"),
                examples=("vgpuctl mig export --config today",),
            ),
            Verb(
                "import",
                "print a configuration of mig-parted as a policy for this node",
                "mig:import_",
                (
                    argument("file", metavar="FILE", help="a YAML file of version v1"),
                    argument("--config", metavar="NAME", help="which one of the file"),
                ),
                outputs=("table", "json", "yaml"),
                details="As in: vgpuctl mig import FILE --config all-balanced "
                "> /etc/vgpud/conf.d/60-mig.toml; vgpuctl policy reload",
                examples=("vgpuctl mig import config.yaml --config all-balanced",),
            ),
            Verb(
                "defrag",
                "move idle instances so that larger ones fit",
                "mig:defrag",
                (
                    *MIG_DEVICES,
                    argument("--dry-run", action="store_true", help="only say what would move"),
                ),
                examples=("vgpuctl mig defrag --dry-run",),
            ),
        ),
    ),
    Group(
        "remote",
        "use a slice of another machine; on the node, grant slices to remote users",
        (
            Verb(
                "run",
                "run a command with a slice of another machine's GPU",
                "remote:run",
                (
                    HOST,
                    *LIMITS,
                    argument("--isolation", type=kinds.isolation, choices=ISOLATIONS, help="as for run"),
                    argument(
                        "--priority",
                        choices=("above-normal", "normal", "below-normal"),
                        help="as for run",
                    ),
                    argument("--label", metavar="TEXT", help="shown in the node's listings"),
                    argument(
                        "--library",
                        metavar="FOLDER",
                        help="the engine's libraries (default /opt/lupine/lib, or VGPU_REMOTE_LIBRARY)",
                    ),
                    *PROOF,
                    argument("command", nargs="*", metavar="-- COMMAND", help="the command"),
                ),
                outputs=("table",),
                details="Needs no GPU, driver or vgpud on this machine. The slice ends with the command.",
                takes_command=True,
                examples=("vgpuctl remote run gpu1.example.com --memory 8GiB --cores 25 -- python train.py",),
            ),
            Verb(
                "status",
                "list your sessions on another machine",
                "remote:status",
                (HOST, *PROOF),
                examples=("vgpuctl remote status gpu1.example.com",),
            ),
            Verb(
                "grant",
                "let a remote user have slices of this node; prints a token (root only)",
                "remote:grant",
                (
                    argument(
                        "user",
                        metavar="USER",
                        help="the account of this node that owns the slices",
                    ),
                    argument(
                        "--memory", type=kinds.memory, metavar="SIZE", help="of all its slices together"
                    ),
                    argument(
                        "--cores", type=kinds.cores, metavar="PERCENT", help="of all its slices together"
                    ),
                    argument("--sessions", type=kinds.sessions, metavar="N", help="slices at one time"),
                    argument(
                        "--expires",
                        type=kinds.lifetime,
                        metavar="SPAN",
                        help="as in 12h or 30d (default never)",
                    ),
                    argument(
                        "--certificate",
                        metavar="FILE",
                        help="identify the user by this certificate, not by a token",
                    ),
                ),
                outputs=("table", "json", "yaml"),
                examples=("vgpuctl remote grant alice --memory 16GiB --cores 50 --expires 30d",),
            ),
            Verb(
                "grants",
                "list the grants of this node (root only)",
                "remote:grants",
                examples=("vgpuctl remote grants",),
            ),
            Verb(
                "revoke",
                "take a grant back; its sessions end within seconds (root only)",
                "remote:revoke",
                (
                    argument(
                        "grant",
                        metavar="GRANT|USER",
                        help="a grant's id, or its first characters (4 or more), or a user with all grants",
                    ),
                ),
                outputs=("table",),
                examples=("vgpuctl remote revoke alice",),
            ),
        ),
    ),
    Group(
        "convert",
        "convert manifests for other tools into manifests for vgpud",
        (
            Verb(
                "hami",
                "Kubernetes manifests written for HAMi",
                "hami:convert",
                (
                    argument("file", metavar="FILE", help="YAML, as for kubectl apply; - is standard input"),
                    argument(
                        "--to",
                        choices=("runtime", "kubelet"),
                        default="runtime",
                        help="request by the runtime class vgpu (default), or by extended resources",
                    ),
                    argument(
                        "--card-memory",
                        type=kinds.memory,
                        metavar="SIZE",
                        help="of the cards, for gpumem-percentage, as in 80GiB",
                    ),
                ),
                outputs=("table",),
                details="Prints the manifests, and on standard error what has no counterpart.",
                examples=("vgpuctl convert hami deployment.yaml --card-memory 80GiB",),
            ),
        ),
    ),
    Verb(
        "drain",
        "let devices take no new tenants, and say what is left on them",
        "mps:drain",
        (DEVICES, argument("--move", action="store_true", help="move what is there to other devices")),
        details="Exits 0 when nothing is left, and 1 while something is; ask again.",
        examples=("vgpuctl drain 3 --move", "vgpuctl drain 0 1 2 3"),
    ),
    Verb(
        "undrain",
        "let devices take tenants again",
        "mps:undrain",
        (DEVICES,),
        examples=("vgpuctl undrain 3",),
    ),
    Verb(
        "top",
        "watch devices and tenants live",
        "top:top",
        (
            argument("-1", "--once", action="store_true", help="print one sample and exit"),
            argument(
                "-d",
                "--delay",
                type=kinds.delay,
                default=2.0,
                metavar="SECONDS",
                help="between samples (default 2)",
            ),
            argument(
                "--sort",
                choices=("memory", "share", "waited", "refused", "device", "owner", "age"),
                default="memory",
                help="the order of the tenants (default memory)",
            ),
            argument(
                "--filter",
                default="",
                metavar="TEXT",
                help="only tenants whose row contains this text, for example gpu0",
            ),
            argument("--ascii", action="store_true", help="bars without block characters"),
        ),
        details="Keys: up and down select; s suspends and r resumes, after a question; o next order, "
        "O reverse order; / filter; ? help; q quit. Into a pipe it prints one sample.",
        examples=(
            "vgpuctl top",
            "vgpuctl top --once --sort waited",
            "vgpuctl top --filter gpu0",
        ),
    ),
    Verb(
        "ps",
        "list processes with their user, allocation and device",
        "ps:ps",
        (WATCHED,),
        examples=("vgpuctl ps",),
    ),
    Verb(
        "why",
        "say why an allocation got its devices, and what limits it now",
        "why:why",
        (argument("subject", metavar="ALLOCATION|PID", help="an allocation's id, or a process of one"),),
        details="Takes a pid too. Exits 1 for a process outside of all allocations.",
        examples=(
            "vgpuctl why 4f2a",
            "vgpuctl why 31337",
        ),
    ),
    Verb(
        "events",
        "print the latest events",
        "ps:events",
        (
            argument(
                "--last", type=kinds.last, default=100, metavar="N", help="number of events (default 100)"
            ),
            argument(
                "--since", type=kinds.since, metavar="SPAN", help="only those of the last 90s, 10min, 2h"
            ),
            argument("--user", type=kinds.uid, metavar="USER", help="only those of this user's allocations"),
        ),
        examples=("vgpuctl events --last 20", "vgpuctl events --since 10min"),
    ),
    Verb(
        "doctor",
        "check this host for vgpud, with a fix for each finding",
        "doctor:doctor",
        details="Needs no daemon to begin with. Exits 37 when a check has failed.",
        examples=("vgpuctl doctor",),
    ),
    Verb(
        "bug-report",
        "write an archive to send with a bug report",
        "bug_report:bug_report",
        (
            argument(
                "--file",
                metavar="FILE",
                help="where to (default vgpud-bug-report-TIME.tar.gz here); - prints",
            ),
        ),
        details="Names of hosts, users, labels, commands, addresses and serial numbers are taken out.",
        examples=("vgpuctl bug-report --file /tmp/report.tar.gz",),
    ),
    Verb(
        "completion",
        "print a shell's completion of vgpuctl",
        "completion:completion",
        (argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish"),),
        outputs=("table",),
        details='As in: eval "$(vgpuctl completion bash)"',
        examples=("vgpuctl completion bash",),
    ),
    Verb(
        "watch",
        "print events as they happen",
        "watch:watch",
        (
            argument(
                "--after", type=kinds.revision, metavar="REVISION", help="also the events after this revision"
            ),
        ),
        outputs=("table", "json"),
        streams=True,
        examples=("vgpuctl watch -o json",),
    ),
)
