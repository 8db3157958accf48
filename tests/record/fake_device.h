/* A device whose memory is host memory, and whose kernels are lists of accesses. */
#ifndef FAKE_DEVICE_H
#define FAKE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vendor/sanitizer_api.h"

/* ``count`` accesses from ``address`` on; flags 0: one tensor load through the map at ``address``. */
typedef struct {
    uint64_t address, stride, count;
    uint32_t bytes, flags;
} touch;

/* The target of a Sanitizer_LaunchHandle. */
typedef struct {
    CUmodule module;
    uint64_t user_data, grid;
    bool is_set;
} fake_launch;

/* Enqueue a kernel. Aborts if the module is patched and the launch has no user data. */
void device_launch(Sanitizer_StreamHandle stream, const fake_launch *launch, const touch *touches, uint32_t count);

/* Run the deferred work of a stream; NULL: of all streams. */
void device_drain(Sanitizer_StreamHandle stream);

/* Return whether a stream has deferred work. */
bool device_is_busy(void);

/* Return the bytes that the recorder has allocated. */
size_t device_allocated_bytes(void);

/* Destroy a stream: its deferred work runs, and its handle may be reused. */
void device_destroy_stream(Sanitizer_StreamHandle stream);

#endif
