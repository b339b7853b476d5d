/* A small libnvidia-ml.so.1 for tests. Its devices live in a file that the test maps too, named by FAKE_NVML_STATE.
 *
 * It answers as nvml.h says, and models what callers get wrong: limits out of range, a missing right, an out-of-band
 * cap, a lost device, indices and handles that move, a driver that was reloaded, heat, other writers (the test writes
 * the limit itself), calls that take long, a setter that does nothing.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
       DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
enum { MAX_DEVICES = 8 };

typedef struct {
    char uuid[64];
    char name[64];
    uint32_t min_mw, max_mw, default_mw, limit_mw;
    uint32_t cap_mw;      /* out-of-band cap; 0: none */
    uint32_t clamp_mw;    /* the setter silently lowers to this; 0: none */
    uint32_t draw_mw;
    uint32_t temperature_c, slowdown_c;
    uint32_t clock_mhz;   /* 0: the device does not say */
    uint32_t reasons;     /* mask of clock event reasons */
    uint32_t is_lost, is_deaf, no_margin;
    uint32_t delay_ms;    /* how long each call on this device takes */
    uint32_t num_sets, highest_set_mw;
    uint64_t energy_mj;
} Device;

typedef struct {
    uint32_t num_devices;
    uint32_t is_unloaded;    /* no driver: nothing works until the test loads it again */
    uint32_t epoch;          /* a reloaded driver wants nvmlInit again: the test counts up */
    uint32_t no_permission;
    uint32_t shift_next;     /* after the next look-up by UUID, handles lead to the next device */
    uint32_t num_v2_sets;
    uint32_t order[MAX_DEVICES];
    Device devices[MAX_DEVICES];
} State;

static State *state;
static uint32_t epoch;

static int ready(void) {
    if (!state) return UNINITIALIZED;
    if (state->is_unloaded) return DRIVER_NOT_LOADED;
    return state->epoch == epoch ? SUCCESS : UNINITIALIZED;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (state) munmap(state, sizeof(State));
    state = NULL;
    const char *path = getenv("FAKE_NVML_STATE");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return DRIVER_NOT_LOADED;
    void *found = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found == MAP_FAILED) return DRIVER_NOT_LOADED;
    state = found;
    epoch = state->epoch;
    return state->is_unloaded ? DRIVER_NOT_LOADED : SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) { (void)code; return "fake error"; }

/* A handle is a place in the driver's order, plus one: what is there may change. */
static int find(void *handle, Device **device) {
    int code = ready();
    if (code) return code;
    uintptr_t place = (uintptr_t)handle;
    if (place < 1 || place > state->num_devices) return INVALID_ARGUMENT;
    *device = &state->devices[state->order[place - 1]];
    if ((*device)->delay_ms) {
        struct timespec pause = {(*device)->delay_ms / 1000, (long)((*device)->delay_ms % 1000) * 1000000L};
        nanosleep(&pause, NULL);
    }
    return (*device)->is_lost ? GPU_IS_LOST : SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    int code = ready();
    if (!code) *count = state->num_devices;
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    Device *device;
    *handle = (void *)(uintptr_t)(index + 1);
    return find(*handle, &device);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    int code = ready();
    if (code) return code;
    if (strncmp(uuid, "GPU-", 4)) return INVALID_ARGUMENT;
    for (unsigned place = 0; place < state->num_devices; place++) {
        Device *device = &state->devices[state->order[place]];
        if (strcmp(device->uuid, uuid)) continue;
        if (device->is_lost) return GPU_IS_LOST;
        *handle = (void *)(uintptr_t)(place + 1);
        if (state->shift_next) {
            state->shift_next = 0;
            uint32_t first = state->order[0];
            memmove(state->order, state->order + 1, (state->num_devices - 1) * sizeof(uint32_t));
            state->order[state->num_devices - 1] = first;
        }
        return SUCCESS;
    }
    return NOT_FOUND;
}

#define WITH_DEVICE Device *device; int code = find(handle, &device); if (code) return code

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    WITH_DEVICE;
    strncpy(text, device->uuid, size);
    return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    WITH_DEVICE;
    strncpy(text, device->name, size);
    return SUCCESS;
}

int nvmlDeviceGetPowerManagementLimitConstraints(void *handle, unsigned *low, unsigned *high) {
    WITH_DEVICE;
    *low = device->min_mw;
    *high = device->max_mw;
    return SUCCESS;
}

int nvmlDeviceGetPowerManagementDefaultLimit(void *handle, unsigned *limit) {
    WITH_DEVICE;
    *limit = device->default_mw;
    return SUCCESS;
}

int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *limit) {
    WITH_DEVICE;
    *limit = device->limit_mw;
    return SUCCESS;
}

static unsigned enforced(const Device *device) {
    return device->cap_mw && device->cap_mw < device->limit_mw ? device->cap_mw : device->limit_mw;
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *limit) {
    WITH_DEVICE;
    *limit = enforced(device);
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *draw) {
    WITH_DEVICE;
    *draw = device->draw_mw < enforced(device) ? device->draw_mw : enforced(device);
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *temperature) {
    WITH_DEVICE;
    (void)sensor;
    *temperature = device->temperature_c;
    return SUCCESS;
}

int nvmlDeviceGetTemperatureThreshold(void *handle, unsigned kind, unsigned *temperature) {
    WITH_DEVICE;
    if (kind != 1) return INVALID_ARGUMENT;
    *temperature = device->slowdown_c;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(void *handle, unsigned kind, unsigned *clock) {
    WITH_DEVICE;
    if (kind != 1) return INVALID_ARGUMENT;
    if (!device->clock_mhz) return NOT_SUPPORTED;
    *clock = device->clock_mhz;
    return SUCCESS;
}

typedef struct { unsigned version; int margin; } Margin;

int nvmlDeviceGetMarginTemperature(void *handle, Margin *margin) {
    WITH_DEVICE;
    if (device->no_margin) return NOT_SUPPORTED;
    margin->margin = (int)device->slowdown_c - (int)device->temperature_c;
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *energy) {
    WITH_DEVICE;
    *energy = device->energy_mj;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons) {
    WITH_DEVICE;
    *reasons = device->reasons;
    return SUCCESS;
}

int nvmlDeviceSetPowerManagementLimit(void *handle, unsigned limit) {
    WITH_DEVICE;
    if (state->no_permission) return NO_PERMISSION;
    if (limit < device->min_mw || limit > device->max_mw) return INVALID_ARGUMENT;
    device->num_sets++;
    if (limit > device->highest_set_mw) device->highest_set_mw = limit;
    if (device->is_deaf) return SUCCESS;
    device->limit_mw = device->clamp_mw && limit > device->clamp_mw ? device->clamp_mw : limit;
    return SUCCESS;
}

int nvmlDeviceSetPowerManagementLimit_v2(void *handle, void *value) {
    WITH_DEVICE;
    (void)value;
    (void)device;
    state->num_v2_sets++;
    return NO_PERMISSION;
}
