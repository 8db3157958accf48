/* Exact accesses: assigns launches to arenas, in which the device patch writes what they access.
 *
 * Each context has two arenas. Launches write to the current one. When the host synchronises, or when the current
 * arena fills up, the other arena replaces it. A replaced arena is read once every launch in it is known to be
 * complete: its streams were synchronised, or have set a marker that was enqueued behind the launches.
 */
#ifndef CK_EXACT_H
#define CK_EXACT_H

#include <stdbool.h>
#include <stdint.h>

#include "hooks/sanitizer_api.h"
#include "write/record.h"

/* At the entry of a launch of ``threads`` threads, or of a graph launch: make sure that an arena has space. Calls
 * CUDA: the lock is not held. */
void exact_prepare(CUcontext context, CUfunction function, uint64_t threads);
void exact_prepare_graph(CUcontext context, CUgraphExec executable);

/* Assign an arena slot to a launch and return its user data; 0 if its accesses will not be recorded. The lock is
 * held; the context's arenas stay until exact_enqueued(). */
uint64_t exact_assign(const record *launch_record, const Sanitizer_LaunchData *launch);

/* This thread's last launch, of a kernel or a graph, is now in its stream, or failed. */
void exact_enqueued(void);

/* The user data of this thread's launch could not be set. */
void exact_assign_failed(void);

/* A graph is about to be launched: return the number of its nodes whose accesses will be recorded. The lock is
 * held. */
uint32_t exact_assign_graph(const record *launch_record, const Sanitizer_GraphLaunchData *launch,
                            uint32_t executable, uint32_t kernels);

/* Assign an arena slot to a kernel node of the graph that this thread launches; node id 0: unknown. The lock is
 * held. */
uint64_t exact_assign_node(const Sanitizer_LaunchData *launch, uint32_t node);

/* This thread synchronised with a stream; NULL: with the whole context. Calls CUDA: the lock is not held. */
void exact_synchronized(CUcontext context, Sanitizer_StreamHandle stream);

/* The host has learned that an event is complete. Calls CUDA: the lock is not held. */
void exact_event_completed(CUcontext context);

/* Whether a stream is the recorder's own, whose creation was not recorded. */
bool exact_is_recorder_stream(Sanitizer_StreamHandle stream);

/* A stream or a context is about to be destroyed. Calls CUDA: the lock is not held. */
void exact_stream_destroying(CUcontext context, Sanitizer_StreamHandle stream);
void exact_context_destroying(CUcontext context);

/* Wait for all launches so far and record their accesses. Calls CUDA: the lock is not held. */
void exact_read(void);

/* At program end: wait for all launches, record their accesses, and free everything. Calls CUDA: the lock is not
 * held. */
void exact_finish(void);

/* Forget all state: after a fork it belongs to the parent. */
void exact_clear(void);

#endif
