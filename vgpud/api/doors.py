"""The doors (sockets), and the least privileged door of each call: the one table for the daemon and its
client.
"""

from vgpud.model.caller import Door

SOCKET_NAMES: dict[Door, str] = {
    Door.READ: "ro.sock",
    Door.TENANT: "vgpud.sock",
    Door.ADMIN: "admin.sock",
}

# the least privileged door of each call; doors with more rights serve it too
LEAST_DOOR: dict[str, Door] = {
    "GetNode": Door.READ,
    "ListDevices": Door.READ,
    "GetAllocation": Door.READ,
    "ListAllocations": Door.READ,
    "Plan": Door.READ,
    "Watch": Door.READ,
    "GetPolicy": Door.READ,
    "Allocate": Door.TENANT,
    "Release": Door.TENANT,
    "Resize": Door.TENANT,
    "Pause": Door.TENANT,
    "Unpause": Door.TENANT,
    "Suspend": Door.TENANT,
    "Resume": Door.TENANT,
    "Move": Door.TENANT,
    "Defrag": Door.ADMIN,
    "PlanDefrag": Door.READ,
    "ReloadPolicy": Door.ADMIN,
    "ListMps": Door.READ,
    "TerminateMpsClient": Door.ADMIN,
    "DrainDevice": Door.ADMIN,
    "ListMig": Door.READ,
    "PlanMig": Door.READ,
    "ApplyMig": Door.ADMIN,
    "GetUsage": Door.READ,
    "ListProcesses": Door.READ,
    "ListEvents": Door.READ,
}

# Calls that change something. If the caller disconnects, the daemon still finishes them.
CHANGING = frozenset(call for call, door in LEAST_DOOR.items() if door > Door.READ)
