#include "model/stream_order.h"

#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "model/graphs.h"

/* Work on further streams counts as unordered. */
#define MAX_STREAMS 128

typedef struct {
    uint64_t last[MAX_STREAMS + 1]; /* number of the last operation that happens before, by slot; 0: none */
} vector_clock;

static vector_clock stream_clocks[MAX_STREAMS + 1]; /* by slot; the stream's own entry is its last operation */
static uint32_t stream_contexts[MAX_STREAMS + 1];   /* context id of each stream, by slot */
static uint32_t slot_count;                         /* slots in use: 1 to slot_count */
static hash_table slots;                            /* slot of each stream id */
static vector_clock host_clock;                     /* operations that the host has waited for */

static vector_clock *event_clocks; /* clocks of recorded events; unused ones are in ``free_events`` */
static uint32_t *free_events;
static size_t event_count, event_capacity, free_count, free_capacity;
static hash_table event_numbers; /* index in ``event_clocks`` plus 1, by event id */

static void join(vector_clock *clock, const vector_clock *other_clock)
{
    for (uint32_t slot = 1; slot <= slot_count; slot++)
        if (clock->last[slot] < other_clock->last[slot])
            clock->last[slot] = other_clock->last[slot];
}

/* Return the slot of a stream; a new stream gets a new slot. Return 0 if there are too many streams. */
static uint32_t slot_of(uint32_t stream, uint32_t context)
{
    uint32_t slot = stream ? hash_table_get(&slots, stream) : 0;
    if (slot || !stream || slot_count == MAX_STREAMS || hash_table_put(&slots, stream, slot_count + 1))
        return slot;
    slot = ++slot_count;
    stream_contexts[slot] = context;
    return slot;
}

stream_operation order_enqueue(uint32_t stream, uint32_t context)
{
    stream_operation operation = {slot_of(stream, context), 0};
    if (!operation.slot)
        return operation;
    vector_clock *clock = stream_clocks + operation.slot;
    join(clock, &host_clock);
    operation.number = ++clock->last[operation.slot];
    return operation;
}

bool order_is_before(stream_operation earlier, stream_operation later)
{
    return earlier.slot && later.slot && earlier.number <= stream_clocks[later.slot].last[earlier.slot];
}

/* --- events ---------------------------------------------------------------------------------------- */

/* Return the clock of an event, or NULL if it was not recorded. */
static vector_clock *event_clock(uint32_t event)
{
    uint32_t number = event ? hash_table_get(&event_numbers, event) : 0;
    return number ? event_clocks + number - 1 : NULL;
}

/* Return a clock for an event that has none. Return NULL if no memory is left. */
static vector_clock *new_event_clock(uint32_t event)
{
    uint32_t index = free_count ? free_events[free_count - 1] : (uint32_t)event_count;
    if (!free_count) {
        vector_clock *clocks =
            array_reserve(event_clocks, &event_capacity, event_count + 1, sizeof *event_clocks, 64);
        if (!clocks)
            return NULL;
        event_clocks = clocks;
    }
    if (!event || hash_table_put(&event_numbers, event, index + 1))
        return NULL;
    if (free_count)
        free_count--;
    else
        event_count++;
    return event_clocks + index;
}

void order_event_destroyed(uint32_t event)
{
    uint32_t number = event ? hash_table_remove(&event_numbers, event) : 0;
    uint32_t *numbers =
        number ? array_reserve(free_events, &free_capacity, free_count + 1, sizeof *free_events, 64) : NULL;
    if (!numbers)
        return;
    free_events = numbers;
    free_events[free_count++] = number - 1;
}

void order_event_recorded(uint32_t event, uint32_t stream, uint32_t context)
{
    uint32_t slot = slot_of(stream, context);
    if (!slot || graphs_is_capturing()) {
        order_event_destroyed(event); /* the earlier record of the event no longer counts */
        return;
    }
    join(stream_clocks + slot, &host_clock);
    vector_clock *clock = event_clock(event);
    if (!clock)
        clock = new_event_clock(event);
    if (clock)
        *clock = stream_clocks[slot];
}

void order_stream_waits(uint32_t stream, uint32_t context, uint32_t event)
{
    uint32_t slot = slot_of(stream, context);
    const vector_clock *clock = event_clock(event);
    if (slot && clock && !graphs_is_capturing())
        join(stream_clocks + slot, clock);
}

/* --- waits of the host ------------------------------------------------------------------------------- */

void order_host_waited_for_event(uint32_t event)
{
    const vector_clock *clock = event_clock(event);
    if (clock)
        join(&host_clock, clock);
}

void order_host_waited_for_stream(uint32_t stream, uint32_t context)
{
    uint32_t slot = slot_of(stream, context);
    if (slot)
        join(&host_clock, stream_clocks + slot);
}

void order_host_waited_for_context(uint32_t context)
{
    for (uint32_t slot = 1; slot <= slot_count; slot++)
        if (stream_contexts[slot] == context)
            join(&host_clock, stream_clocks + slot);
}

bool order_host_waited_for_all(void)
{
    bool all_complete = slot_count < MAX_STREAMS;
    for (uint32_t slot = 1; slot <= slot_count; slot++)
        all_complete = all_complete && host_clock.last[slot] == stream_clocks[slot].last[slot];
    return all_complete;
}

void order_clear(void)
{
    memset(stream_clocks, 0, sizeof stream_clocks);
    memset(&host_clock, 0, sizeof host_clock);
    hash_table_clear(&slots);
    hash_table_clear(&event_numbers);
    slot_count = 0;
    event_count = free_count = 0;
}
