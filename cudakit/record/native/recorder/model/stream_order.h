/* The order of work on streams: which earlier work has certainly completed before new work of a stream starts.
 *
 * Every stream has a vector clock: for each stream, the number of its last operation that happens before new work of
 * the stream. Stream order, events and waits of the host set the clocks. Work that is ordered in another way, such as
 * by the legacy default stream or by stream memory operations, counts as unordered here. All host threads are one
 * timeline, as in the analysis. Callers hold the recorder lock. */
#ifndef CK_STREAM_ORDER_H
#define CK_STREAM_ORDER_H

#include <stdbool.h>
#include <stdint.h>

/* An operation of a stream. */
typedef struct {
    uint64_t slot : 16;   /* index of the stream's vector clock, from 1; 0: the operation's order is unknown */
    uint64_t number : 48; /* number of the operation in its stream, from 1 */
} stream_operation;

/* Handle the coming destruction of a stream or a context. The enqueued work of a destroyed stream may still run; that of
 * a destroyed context is complete. */
void order_stream_destroyed(uint32_t stream);
void order_context_destroyed(uint32_t context);

/* Add an operation to a stream, and return the operation. ``stream`` and ``context`` are ids. The slot of the
 * operation is 0 if there are too many streams. */
stream_operation order_enqueue(uint32_t stream, uint32_t context);

/* Return whether an operation happens before an operation that was enqueued later. */
bool order_happens_before(stream_operation earlier, stream_operation later);

/* Return whether an operation happens before the next operation of a stream. ``stream`` is an id. */
bool order_happens_before_next(stream_operation earlier, uint32_t stream);

/* Handle the record of an event on a stream, and the destruction of an event. An event that was recorded during a
 * stream capture orders nothing. */
void order_event_recorded(uint32_t event, uint32_t stream, uint32_t context);
void order_event_destroyed(uint32_t event);

/* Handle a stream that waits for an event: later work of the stream starts after the work before the event. */
void order_stream_waits(uint32_t stream, uint32_t context, uint32_t event);

/* Handle a host wait for an event, for all work of a stream, or for all streams of a context. */
void order_host_waited_for_event(uint32_t event);
void order_host_waited_for_stream(uint32_t stream);
void order_host_waited_for_context(uint32_t context);

/* The operations that happen before a point of a stream. */
typedef struct order_point order_point;

/* Return the point behind all work of a stream so far. Return NULL if no memory is left. */
order_point *order_point_of_stream(uint32_t stream, uint32_t context);

/* Handle a host function that the stream has reached at this point, and free the point. NULL is allowed. */
void order_host_reached(order_point *point);

/* Return whether the host has waited for an operation. */
bool order_host_waited_for(stream_operation operation);

/* Return whether calls of the host have waited for all work: of all contexts, or of all contexts but one. */
bool order_host_waited_for_all_work(void);
bool order_host_waited_for_other_contexts(uint32_t context);

/* Return the number of times that the host had waited for all work, with new work in between. */
uint32_t order_idle_count(void);

/* Change the number of active stream captures: by +1 when a capture begins, by -1 when it ends. */
void order_count_captures(int change);

/* Return whether any stream is being captured. */
bool order_is_capturing(void);

/* Forget all streams, events and captures, in the child of a fork. */
void stream_order_clear(void);

#endif
