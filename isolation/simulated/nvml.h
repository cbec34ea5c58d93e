/* What the parts of the simulated NVML share. */
#ifndef SIMULATED_NVML_H
#define SIMULATED_NVML_H

#include "machine.h"

#include "nvml_abi.h"

#define NVML_EXPORT __attribute__((visibility("default")))

/* The machine, between nvmlInit and nvmlShutdown; else NULL. */
const struct machine *nvml_machine(void);

/* The device of a handle, NULL if it is none of ours or NVML is not initialised: `*why` says which. */
const struct machine_device *nvml_device(nvmlDevice_t handle, nvmlReturn_t *why);

/* `text` into the caller's buffer, whole or not at all. */
nvmlReturn_t nvml_text(const char *text, char *out, unsigned size);

#define DEVICE_OR_RETURN(device, handle)                                 \
    nvmlReturn_t device##_why;                                           \
    const struct machine_device *device = nvml_device(handle, &device##_why); \
    if (!device)                                                         \
    return device##_why

#endif
