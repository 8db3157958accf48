/* A device whose memory is the host's, and whose kernels are lists of what they touch. */
#ifndef FAKE_DEVICE_H
#define FAKE_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "hooks/sanitizer_api.h"

/* ``count`` accesses, the first at ``address``; of flags 0, one load of a tensor by the map that is there. */
typedef struct {
    uint64_t address, stride, count;
    uint32_t bytes, flags;
} touch;

/* What a Sanitizer_LaunchHandle is. */
typedef struct {
    CUmodule module;
    uint64_t user_data, grid;
    bool is_set;
} fake_launch;

/* Put a kernel into a stream. One of a patched module that has no user data ends the process. */
void device_launch(Sanitizer_StreamHandle stream, const fake_launch *launch, const touch *touches, uint32_t count);

/* Have a stream, NULL: each of them, do what it holds. */
void device_drain(Sanitizer_StreamHandle stream);

/* A stream is gone: what it holds is done nevertheless, and its handle may come again. */
void device_forget(Sanitizer_StreamHandle stream);

#endif
