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

#endif
