/* Exact accesses: assigns launches to arenas, to which the device patch writes the accesses of each launch.
 *
 * Each context has two arenas. Launches write to the current one. When the host synchronizes, or when the current
 * arena fills up, the other arena replaces it. A replaced arena is read once all launches in it are known to be
 * complete: the host has synchronized with their streams, or the streams have reached a marker behind the launches.
 */
#ifndef CK_EXACT_H
#define CK_EXACT_H

#include <stdbool.h>
#include <stdint.h>

#include "exact/templates.h"
#include "model/kernels.h"
#include "vendor/sanitizer_api.h"
#include "write/record.h"

/* Make sure that an arena has space for a kernel launch of ``threads`` threads, or for a graph launch. Also read complete
 * arenas from time to time. With ``may_be_recorded`` false, the launch needs no space. Called at the entry of the driver
 * call. Calls CUDA: the recorder lock is not held. */
void exact_prepare(CUcontext context, CUfunction function, uint64_t threads, bool may_be_recorded);
void exact_prepare_graph(CUcontext context, CUgraphExec executable);

/* Assign a launch index to a kernel launch and return its user data, or 0 if its accesses will not be recorded.
 * By ``signature`` and ``arguments``, the accesses of the launch are later compared with those of earlier
 * launches. The recorder lock is held. The arena is not replaced before exact_launch_ended(). */
uint64_t exact_assign_launch(const record *launch_record, const Sanitizer_LaunchData *launch,
                             const launch_signature *signature, const launch_arguments *arguments);

/* Return the template of a kernel launch. If the launch must be recorded, return template 0 and set ``signature``.
 * Also add the launch to the work on the allocations that it reaches. The recorder lock is held. */
launch_template exact_choose_template(const record *launch_record, const Sanitizer_LaunchData *launch,
                                      const launch_arguments *arguments, launch_signature *signature);

/* Return whether the patch of a kernel's module is removed. The recorder lock is held. */
bool exact_lacks_patch(const Sanitizer_LaunchData *launch);

/* Do the same as exact_choose_template() for the launch of a graph. */
launch_template exact_choose_graph_template(const record *launch_record, launch_signature *signature);

/* Handle the end of this thread's last launch of a kernel or a graph: it is enqueued on its stream, or it failed.
 * Takes the recorder lock. */
void exact_launch_ended(void);

/* Handle a failure to set the user data of this thread's launch. Takes the recorder lock. */
void exact_assign_failed(void);

/* Begin a graph launch that need not be recorded. The recorder lock is held. */
void exact_skip_graph(CUcontext context);

/* Begin a graph launch, and return the number of its nodes whose accesses will be recorded. The recorder lock is
 * held. */
uint32_t exact_assign_graph(const record *launch_record, const Sanitizer_GraphLaunchData *launch, uint32_t kernels,
                            const launch_signature *signature);

/* Assign a launch index to a kernel node of the graph that this thread launches, and return the user data. ``node`` is
 * the node id, or 0 if it is unknown. The recorder lock is held. */
uint64_t exact_assign_node(const Sanitizer_LaunchData *launch, uint32_t node);

/* Handle a synchronization of this thread with a stream, or with all streams of the context if ``stream`` is NULL.
 * Calls CUDA: the recorder lock is not held. */
void exact_on_synchronize(CUcontext context, Sanitizer_StreamHandle stream);

/* Handle an event that the host knows to be complete, after a wait or a query. Calls CUDA: the recorder lock is not
 * held. */
void exact_on_completed_event(CUcontext context);

/* Return whether a stream belongs to the recorder. The creation of such a stream is not recorded. Takes the recorder
 * lock. */
bool exact_is_recorder_stream(Sanitizer_StreamHandle stream);

/* Handle the coming destruction of a stream or a context. Calls CUDA: the recorder lock is not held. */
void exact_stream_destroying(CUcontext context, Sanitizer_StreamHandle stream);
void exact_context_destroying(CUcontext context);

/* Wait for all launches so far and record their accesses. Calls CUDA: the recorder lock is not held. */
void exact_read_all(void);

/* At program end: wait for all launches, record their accesses, and free all arenas. Calls CUDA: the recorder lock is
 * not held. */
void exact_finish(void);

/* Clear all state in the child of a fork: the arenas belong to the parent. */
void exact_clear(void);

#endif
