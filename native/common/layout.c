/* layout.c: prints vgpud/lease_layout.py, so that Python uses the lease's layout as the C compiler sees it. */
#include <stdio.h>

#include "lease.h"

#define CONSTANT(name, value) printf("%s = %llu\n", name, (unsigned long long)(value))
#define SIZE(prefix, type) CONSTANT(prefix "_SIZE", sizeof(struct type))
#define FIELD(prefix, type, name, field) CONSTANT(prefix "_" name, offsetof(struct type, field))

static void constants(void)
{
    CONSTANT("MAGIC", VGPU_LEASE_MAGIC);
    CONSTANT("VERSION", VGPU_LEASE_VERSION);
    CONSTANT("MAX_DEVICES", VGPU_MAX_DEVICES);
    CONSTANT("MAX_SLOTS", VGPU_MAX_SLOTS);
    CONSTANT("UUID_BYTES", VGPU_UUID_BYTES);
    CONSTANT("CALL_BYTES", VGPU_CALL_BYTES);
    CONSTANT("ID_BYTES", VGPU_ID_BYTES);
    CONSTANT("SHARE_ALL", VGPU_SHARE_ALL);
    CONSTANT("SHARE_NONE", VGPU_SHARE_NONE);
    CONSTANT("SHARE_HARD", VGPU_SHARE_HARD);
    CONSTANT("SHARE_WORK_CONSERVING", VGPU_SHARE_WORK_CONSERVING);
    CONSTANT("LEASE_OPEN", VGPU_LEASE_OPEN);
    CONSTANT("LEASE_CLOSED", VGPU_LEASE_CLOSED);
    CONSTANT("LEASE_SUSPENDED", VGPU_LEASE_SUSPENDED);
    CONSTANT("MEMORY_FIXED", VGPU_MEMORY_FIXED);
    CONSTANT("MEMORY_HERE", VGPU_MEMORY_HERE);
    CONSTANT("MEMORY_OUT", VGPU_MEMORY_OUT);
    CONSTANT("MEMORY_SOON", VGPU_MEMORY_SOON);
    CONSTANT("SAVES_NOTHING", VGPU_SAVES_NOTHING);
    CONSTANT("SAVES_REST", VGPU_SAVES_REST);
    CONSTANT("SAVES_PARKED", VGPU_SAVES_PARKED);
    CONSTANT("SWAP_HERE", VGPU_SWAP_HERE);
    CONSTANT("SWAP_DRAINING", VGPU_SWAP_DRAINING);
    CONSTANT("SWAP_GOING", VGPU_SWAP_GOING);
    CONSTANT("SWAP_OUT", VGPU_SWAP_OUT);
    CONSTANT("SWAP_COMING", VGPU_SWAP_COMING);
    CONSTANT("SWAP_REFUSED", VGPU_SWAP_REFUSED);
    CONSTANT("SWAP_KEPT_SHIFT", VGPU_SWAP_KEPT_SHIFT);
    CONSTANT("SWAP_READY", VGPU_SWAP_READY);
    CONSTANT("PREPARE_STEP_BYTES", VGPU_PREPARE_STEP_BYTES);
    CONSTANT("PREPARED_PART", VGPU_PREPARED_PART);
    CONSTANT("STAY_KINDS", VGPU_STAY_KINDS);
    CONSTANT("OWNER_SELF", VGPU_OWNER_SELF);
    CONSTANT("NO_SLOT", VGPU_NO_SLOT);
    CONSTANT("LIST_REFUSED", VGPU_LIST_REFUSED);
    CONSTANT("LIST_PAUSED", VGPU_LIST_PAUSED);
    CONSTANT("LIST_LINKS", VGPU_LIST_LINKS);
    CONSTANT("MSG_ADD", VGPU_MSG_ADD);
    CONSTANT("MSG_REMOVE", VGPU_MSG_REMOVE);
    CONSTANT("MSG_LIST", VGPU_MSG_LIST);
    CONSTANT("MSG_LOOK", VGPU_MSG_LOOK);
    CONSTANT("MSG_OK", VGPU_MSG_OK);
    CONSTANT("MSG_ERROR", VGPU_MSG_ERROR);
    CONSTANT("MSG_PROCESSES", VGPU_MSG_PROCESSES);
    printf("MOUNT = \"%s\"\n", VGPU_LEASE_MOUNT);
    printf("ENVIRONMENT = \"%s\"\n", VGPU_LEASE_ENV);
    printf("LIMITS_FILE = \"%s\"\n", VGPU_LIMITS_FILE);
    printf("USAGE_FILE = \"%s\"\n", VGPU_USAGE_FILE);
    printf("USAGE_MOUNT = \"%s\"\n", VGPU_USAGE_MOUNT);
    printf("MOVED_FILE = \"%s\"\n", VGPU_MOVED_FILE);
    printf("ANYONE_FOLDER = \"%s\"\n", VGPU_ANYONE_FOLDER);
    printf("ARBITER_SOCKET = \"%s\"\n", VGPU_ARBITER_SOCKET);
}

static void limits(void)
{
    SIZE("LIMITS", vgpu_limits);
    FIELD("LIMITS", vgpu_limits, "GENERATION", generation);
    FIELD("LIMITS", vgpu_limits, "ALLOCATION", allocation);
    FIELD("LIMITS", vgpu_limits, "STATE", state);
    FIELD("LIMITS", vgpu_limits, "DEVICE_COUNT", device_count);
    FIELD("LIMITS", vgpu_limits, "DEVICES", devices);
    FIELD("LIMITS", vgpu_limits, "MEMORY", memory);
    SIZE("DEVICE_LIMITS", vgpu_device_limits);
    FIELD("DEVICE_LIMITS", vgpu_device_limits, "MEMORY_BYTES", memory_bytes);
    FIELD("DEVICE_LIMITS", vgpu_device_limits, "SHARE", share);
    FIELD("DEVICE_LIMITS", vgpu_device_limits, "SHARE_POLICY", share_policy);
    FIELD("DEVICE_LIMITS", vgpu_device_limits, "PRIORITY", priority);
}

static void usage(void)
{
    SIZE("USAGE", vgpu_usage);
    FIELD("USAGE", vgpu_usage, "SLOT_HIGH", slot_high);
    FIELD("USAGE", vgpu_usage, "CONTEXT_MIB", context_mib);
    FIELD("USAGE", vgpu_usage, "UNKNOWN_CALLS", unknown_calls);
    FIELD("USAGE", vgpu_usage, "UNKNOWN_CALL", unknown_call);
    FIELD("USAGE", vgpu_usage, "RETIRED", retired);
    FIELD("USAGE", vgpu_usage, "SLOTS", slots);
    FIELD("USAGE", vgpu_usage, "COMPUTE", compute);
    CONSTANT("USAGE_FILE_SIZE", VGPU_USAGE_FILE_BYTES);
    CONSTANT("CHANNELS_AT", VGPU_CHANNELS_AT);
    SIZE("CHANNELS", vgpu_channel_table);
    FIELD("CHANNELS", vgpu_channel_table, "COUNT", count);
    FIELD("CHANNELS", vgpu_channel_table, "OFF", off);
    FIELD("CHANNELS", vgpu_channel_table, "STAYS_MIB", stays_mib);
    FIELD("CHANNELS", vgpu_channel_table, "GROUPS", groups);
    SIZE("CHANNEL_GROUP", vgpu_channel_group);
    SIZE("COMPUTE", vgpu_compute);
    FIELD("COMPUTE", vgpu_compute, "GRANTED_NS", granted_ns);
    FIELD("COMPUTE", vgpu_compute, "USED_NS", used_ns);
    FIELD("COMPUTE", vgpu_compute, "WAITED_NS", waited_ns);
    FIELD("COMPUTE", vgpu_compute, "OVERRUN_NS", overrun_ns);
    FIELD("COMPUTE", vgpu_compute, "TURNS", turns);
    FIELD("COMPUTE", vgpu_compute, "BYPASSES", bypasses);
    SIZE("SLOT", vgpu_slot);
    FIELD("SLOT", vgpu_slot, "PID", pid);
    FIELD("SLOT", vgpu_slot, "START_NS", start_ns);
    FIELD("SLOT", vgpu_slot, "CALLS", calls);
    FIELD("SLOT", vgpu_slot, "LOOKS", looks);
    FIELD("SLOT", vgpu_slot, "BUSY", busy);
    FIELD("SLOT", vgpu_slot, "QUIET", quiet);
    FIELD("SLOT", vgpu_slot, "WANTS", wants);
    FIELD("SLOT", vgpu_slot, "SWAP_PHASE", swap_phase);
    FIELD("SLOT", vgpu_slot, "SWAP_ERROR", swap_error);
    FIELD("SLOT", vgpu_slot, "MOVABLE_BYTES", movable_bytes);
    FIELD("SLOT", vgpu_slot, "HOST_BYTES", host_bytes);
    FIELD("SLOT", vgpu_slot, "DEVICES", devices);
    SIZE("SLOT_DEVICE", vgpu_slot_device);
    FIELD("SLOT_DEVICE", vgpu_slot_device, "USED_BYTES", used_bytes);
    FIELD("SLOT_DEVICE", vgpu_slot_device, "CLAIM_BYTES", claim_bytes);
    FIELD("SLOT_DEVICE", vgpu_slot_device, "CONTEXT_BYTES", context_bytes);
    FIELD("SLOT_DEVICE", vgpu_slot_device, "PEAK_BYTES", peak_bytes);
    FIELD("SLOT_DEVICE", vgpu_slot_device, "REFUSALS_LIMIT", refusals_limit);
    FIELD("SLOT_DEVICE", vgpu_slot_device, "REFUSALS_CARD", refusals_card);
    FIELD("SLOT_DEVICE", vgpu_slot_device, "LAUNCHES", launches);
    FIELD("SLOT_DEVICE", vgpu_slot_device, "THROTTLED_NS", throttled_ns);
}

static void messages(void)
{
    SIZE("MESSAGE", vgpu_message);
    FIELD("MESSAGE", vgpu_message, "SLOT", slot);
    FIELD("MESSAGE", vgpu_message, "VALUE", value);
    FIELD("MESSAGE", vgpu_message, "ALLOCATION", allocation);
    FIELD("MESSAGE", vgpu_message, "TURN_NUMBER", turn.number);
    FIELD("MESSAGE", vgpu_message, "TURN_LENGTH_NS", turn.length_ns);
    FIELD("MESSAGE", vgpu_message, "TURN_FLAGS", turn.flags);
    SIZE("PROCESS_LIST", vgpu_process_list);
    FIELD("PROCESS_LIST", vgpu_process_list, "PIDS", pids);
}

int main(void)
{
    puts(
        "\"\"\"The lease's layout, generated from native/common/lease.h at build: sizes and offsets in bytes.\"\"\"\n");
    constants();
    limits();
    usage();
    messages();
    return 0;
}
