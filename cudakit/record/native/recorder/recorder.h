/* State that all parts of the recorder share: the recorder lock, settings, and how records begin. Includes nothing that
 * stands above it: the other state belongs to the file that changes it.
 *
 * Callbacks arrive on any thread, while frameworks and the driver hold locks of their own. Therefore nothing in
 * the recorder waits for the GIL, and no CUDA function is called while ``recorder_lock`` is held: that lock only
 * protects short, bounded work. In the comments of all files, "the recorder lock" is ``recorder_lock``.
 */
#ifndef CK_RECORDER_H
#define CK_RECORDER_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "write/record.h"

typedef struct {
    uint32_t id;           /* kernel thread id (gettid) */
    bool in_recorder_call; /* the recorder itself makes a CUDA call, whose callbacks are ignored */
    uint64_t call_number;  /* number of subscribed driver calls that the thread has made so far */
    uint64_t delayed_seq;  /* ``seq`` of the launch that the recorder delays; 0 if no launch is delayed */
} thread_state;

extern __thread thread_state this_thread;
extern pthread_mutex_t recorder_lock;

/* --- settings: set before recording starts --------------------------------------------------------- */

/* Use templates (exact/templates.h) from now on; return whether they are used. */
void templates_enable(void);
bool templates_are_enabled(void);

/* Patch modules (exact/modules.h) from now on; return whether they are patched. */
void patching_enable(void);
bool patching_is_enabled(void);

/* --- records --------------------------------------------------------------------------------------- */

/* Return a record whose common fields are set, with a new ``seq``. ``site`` is the id of a call site. The recorder lock
 * is held. */
record record_begin(uint16_t kind, uint32_t context, uint32_t stream, uint32_t site);

/* Do the same as record_begin(), with a time that the caller has read. The recorder lock is held. */
record record_begin_at(int64_t time_ns, uint16_t kind, uint32_t context, uint32_t stream, uint32_t site);

/* Return the time of the trace's clock, CLOCK_MONOTONIC, in nanoseconds. */
int64_t monotonic_ns(void);

/* From now on, call ``prepare`` before each record is begun, or nothing if it is NULL. The recorder lock is held, also
 * when ``prepare`` is called. */
void record_prepare_with(void (*prepare)(void));

/* Set the device of a context, which record_begin() copies to records. ``context`` is an id. The recorder lock is
 * held. */
void set_context_device(uint32_t context, int device);

/* Return the device of a context, or -1 if unknown. ``context`` is an id. The recorder lock is held. */
int context_device(uint32_t context);

/* Append one record. The recorder lock is held. */
void record_append(const record *rec);

/* Append one record, and release the recorder lock. */
void record_append_and_unlock(const record *rec);

/* Begin a delay of this thread's launch: record its ``seq``, so that work of other threads during the delay does not
 * order the launch. Takes the recorder lock. */
void launch_begin_delay(void);

/* Return the ``seq`` of this thread's launch: that of the begin of the delay, or ``new_seq`` without a delay. */
uint64_t launch_seq(uint64_t new_seq);

/* End the delay of this thread's launch, if the recorder delayed it. The recorder lock is held. */
void launch_end_delay(void);

/* Append a GAP record: work could not be recorded in full for this reason, ``count`` times. ``detail`` is appended
 * to the reason. The recorder lock is held. */
void record_gap(const char *reason);
void record_gaps(const char *reason, uint64_t count);
void record_gap_detail(const char *reason, const char *detail);

#endif
