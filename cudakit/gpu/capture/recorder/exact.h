/* What kernels really access: which launch leaves it where, and when it is read.
 *
 * Each context has two arenas. Launches leave their accesses in the current one. Where the host waits, or
 * when it fills up, the other one takes its place, and it is read as soon as every launch in it is known to
 * be complete: its streams were waited for, or have set a mark that was enqueued behind it.
 */
#ifndef CK_EXACT_H
#define CK_EXACT_H

#include <stdbool.h>
#include <stdint.h>

#include "record.h"
#include "sanitizer_api.h"

/* At the entry of a call that launches so many threads: see to it that there is room. Calls CUDA: the lock is
 * not held. */
void exact_prepare(CUcontext context, uint64_t threads);
void exact_prepare_graph(CUcontext context, CUgraphExec executable);

/* Give a launch its place, and return its user data; 0 where its accesses will not be told. ``like`` is its
 * record. The lock is held; the context's next launches wait for exact_entered(). */
uint64_t exact_take(const record *like, const Sanitizer_LaunchData *launch);

/* What this thread launched last, a kernel or a graph, is in its stream, or it failed. */
void exact_entered(void);

/* The user data of this thread's launch could not be set. */
void exact_unset(void);

/* A graph will be launched: say how many of its nodes will be told. The lock is held. */
uint32_t exact_graph(const record *like, const Sanitizer_GraphLaunchData *launch, uint32_t executable,
                     uint32_t kernels);

/* Give a kernel of the graph that this thread launches its place; its number is 0 where it is not known.
 * The lock is held. */
uint64_t exact_node(const Sanitizer_LaunchData *launch, uint32_t node);

/* This thread waited for a stream, NULL: for the whole context. Calls CUDA: the lock is not held. */
void exact_waited(CUcontext context, Sanitizer_StreamHandle stream);

/* The host came to know that an event was reached. Calls CUDA: the lock is not held. */
void exact_reached(CUcontext context);

/* Whether a stream is the recorder's own, which was not told when it came. */
bool exact_owns(Sanitizer_StreamHandle stream);

/* A stream or a context is about to go. Calls CUDA: the lock is not held. */
void exact_stream_gone(CUcontext context, Sanitizer_StreamHandle stream);
void exact_context_gone(CUcontext context);

/* Wait for all launches up to now, and read them. Calls CUDA: the lock is not held. */
void exact_read(void);

/* The program ends: wait for everything, read it, and give everything back. Calls CUDA: the lock is not held. */
void exact_finish(void);

/* Forget everything: it is another process's. */
void exact_clear(void);

#endif
