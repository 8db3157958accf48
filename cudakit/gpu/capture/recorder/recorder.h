/* What the parts of the recorder share: its lock, its numbers, and what a thread is doing.
 *
 * Callbacks come on any thread, while frameworks and the driver hold locks of their own. So nothing here
 * waits for Python, and nothing calls CUDA while the recorder's lock is held: the lock is held for short,
 * bounded work only.
 */
#ifndef CK_RECORDER_H
#define CK_RECORDER_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver_api.h"
#include "record.h"
#include "sanitizer_api.h"

struct kernel_layout;
struct arena;

/* The launch of a graph whose nodes leave their accesses in an arena. */
typedef struct {
    record like;
    uint32_t executable, kernels, left; /* kernels that have not come yet */
    uint32_t base, room;                /* indices of launches; room 0: none yet */
    uint64_t first_grid;                /* %gridid of the first index */
    bool refused;
} graph_entry;

typedef struct {
    uint64_t id;    /* of the operating system */
    bool own_query; /* inside a call that the recorder itself makes */
    bool patching;  /* and one that patches a module */
    bool in_graph;  /* inside the launch of a graph, whose nodes are known */
    uint32_t function; /* the driver's function that is being called, 0: another one */

    /* of a launch */
    void **parameters, **extra;
    const struct kernel_layout *layout;
    uint64_t user_data; /* of its accesses */
    /* of the creation of a stream */
    uint32_t stream_flags;
    int32_t stream_priority;
    /* of a copy of a box: rows from one slice to the next */
    uint64_t source_height, destination_height;
    /* of an instantiation: the number of the graph, and how many kernels it has */
    uint32_t graph, graph_kernels;
    /* of the launch of a graph */
    uint32_t expected_kernels, seen_kernels, launched_graph;
    graph_entry entry;
    /* of a launch that has a place in an arena and is not in its stream yet */
    struct arena *entered;
    Sanitizer_StreamHandle entered_stream;
} thread_state;

extern __thread thread_state this_thread;
extern pthread_mutex_t recorder_lock;
extern sanitizer_api sanitizer;

/* Number what the driver calls by handles; numbers are never given again. The lock is held. */
uint32_t number_of_context(CUcontext context);
uint32_t number_of_stream(Sanitizer_StreamHandle stream, CUcontext context);
uint32_t number_of_event(CUevent event);

/* Begin a record: its common part is filled in, with a new ``seq`` and the site given. */
record record_begin(uint16_t kind, uint32_t context, uint32_t stream, uint32_t site);

/* Remember which device the records of a context are of. */
void record_device(uint32_t context, CUdevice device);

/* The device of a context, -1 where it is not known. */
int device_of_context(CUcontext context);

/* Append one record. */
void record_one(const record *one);

/* Take the lock, and begin a record of what this thread is doing; append it, and release the lock. */
record record_locked(uint16_t kind, CUcontext context, Sanitizer_StreamHandle stream);
void record_unlocked(const record *made);

/* Append a GAP: something that could not be understood. */
void record_gap(const char *what);
void record_gaps(const char *what, uint64_t count);
void record_gap_with(const char *what, const char *detail);

/* The callback of the Sanitizer API. */
void on_callback(void *unused, int domain, uint32_t cbid, const void *data);

/* Its parts: a call of the driver API, before and after; what comes and goes. */
void on_driver_call(uint32_t cbid, const Sanitizer_CallbackData *data);
void on_resource(uint32_t cbid, const void *data);

/* Handles and their numbers, and the live allocations, of which a fork keeps none. */
void numbers_clear(void);

/* --- numbers of handles (numbers.c) -------------------------------------------------------------- */

void context_created(CUcontext context, CUdevice device);
bool context_is_created(CUcontext context);
void context_forget(CUcontext context);
uint32_t stream_created(Sanitizer_StreamHandle stream, CUcontext context, uint8_t flag, int16_t priority,
                        uint32_t site);
uint32_t stream_forget(Sanitizer_StreamHandle stream);
void event_created(CUevent event);
void event_forget(CUevent event);
uint32_t new_graph(void);
void executable_made(CUgraphExec executable, uint32_t graph, uint32_t kernels);
void executable_forget(CUgraphExec executable);
uint32_t graph_of_executable(CUgraphExec executable, uint32_t *number, uint32_t *kernels);

#endif
