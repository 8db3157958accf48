/* Determines when the process is profiled, and subscribes to CUPTI until the profile ends. */
#ifndef CK_PROFILE_WINDOW_H
#define CK_PROFILE_WINDOW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *library_path; /* path of libcupti.so */
    const char *range_name;   /* name of the NVTX range in which the process is profiled; "" for any time */
    double delay_s;           /* seconds from the first use of CUDA until the profile begins */
    double duration_s;        /* seconds from the begin of the profile to its end; 0: it ends with the process */
    bool is_paused;           /* whether the profile waits for a call of cudaProfilerStart */
} profile_options;

/* A call of the runtime or driver that a thread has entered. */
typedef struct {
    int domain; /* 0: the thread is in no recorded call */
    uint32_t correlation, generation;
    int64_t start_ns;
} profiled_call;

/* Profile the process from its first use of CUDA: the driver then loads this library and calls InitializeInjection.
 * Return NULL. If CUDA_INJECTION64_PATH already names the library of another tool, change nothing and return its
 * path. */
const char *profile_at_first_use(const profile_options *options);

/* Profile the process from now on. On failure return false and write the reason to ``error``. */
bool profile_begin(const profile_options *options, char *error, size_t error_bytes);

/* End the profile: wait for the work of the current context, write all records and unsubscribe. Calls CUDA and
 * CUPTI: the recorder lock is not held. A second call does nothing. */
void profile_end(void);

/* End the profile, and do not begin one in this process or its children. */
void profile_cancel(void);

/* Forget the profile of the parent in the child of a fork. If the parent has not used CUDA, the child begins a profile
 * of its own at its first use of CUDA. */
void profile_forked(void);

/* Return whether this is the name of the range in the options. Handle the begin and the end of a range with this
 * name. Calls CUPTI: the recorder lock is not held. */
bool window_is_range(const char *name);
void window_range_began(void);
void window_range_ended(void);

/* Handle cudaProfilerStart and cudaProfilerStop. */
void window_pause(bool is_paused);

/* Return whether the process is profiled now. */
bool window_is_open(void);

/* Return a number that changes whenever callbacks are enabled. */
uint32_t window_generation(void);

#endif
