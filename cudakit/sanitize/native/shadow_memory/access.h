/* Clocks, operations and accesses: the C counterparts of ordering.py. */
#ifndef CUDAKIT_SANITIZE_ACCESS_H
#define CUDAKIT_SANITIZE_ACCESS_H

#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

/* The same values as in trace/kinds.py: AccessMode and Precision. */
enum { MODE_READ = 1, MODE_WRITE = 2, MODE_ATOMIC = 4 };
enum { PRECISION_MERGED = 0, PRECISION_EXACT = 1, PRECISION_ASSUMED = 3, PRECISION_UNCERTAIN = 4 };

/* The same value as clocks.NEVER: the tick of a stream-ordered free, which no access is ordered after. */
#define TICK_NEVER ((uint64_t)1 << 63)

/* A clock: for each slot, the last tick that happens before an operation. */
struct clock {
    PyObject
        *list; /* the list of Python from which the ticks were copied; ordering.py never changes lists in place */
    uint64_t *ticks;
    Py_ssize_t width; /* number of slots */
    Py_ssize_t capacity;
};

/* Copy the ticks of a list, unless it is the list of the last call. Return -1 with an exception on errors. */
int clock_load(struct clock *clock, PyObject *list);
void clock_release(struct clock *clock);

/* A CUDA call, or a graph node in a graph launch, with the attributes of clocks.Call that accesses are compared by. */
struct operation {
    uint64_t reference_count;
    PyObject *call;   /* the Call; if `launch` is not NULL, the Call that added the node to the graph */
    PyObject *launch; /* the Call of the graph launch, until Python code needs Call.in_launch(); else NULL */
    uint64_t seq;
    long long kind, name, site, node, program_call;
    uint32_t
        position; /* position of the graph node in the order of the graph's nodes; NO_NODE outside of graphs */
};
#define NO_NODE UINT32_MAX

/* Return a new operation for a Call, or NULL with an exception. */
struct operation *operation_new(PyObject *call);
/* The numbers of a graph node, as conflicts.GraphAccesses packs them. */
struct packed_node {
    int64_t kind, name, site, node;
    uint64_t position;  /* position of the node in the order of the graph's nodes */
    uint64_t row_bytes; /* number of bytes of the records of the accesses of the node */
};

/* Return a new operation for a graph node in a graph launch, or NULL with an exception. `node_call` is the Call that
 * added the node, `launch` an operation with the Call of the graph launch. */
struct operation *operation_new_in_launch(PyObject *node_call, const struct packed_node *node,
                                          const struct operation *launch);
/* Return the Call of an operation as a borrowed reference, or NULL with an exception. */
PyObject *operation_call(struct operation *operation);
void operation_release(struct operation *operation);

/* An access of an operation to the bytes from lo up to hi, at a tick of the operation's slot. States share accesses,
 * so an access does not change after its creation, except that its tick may become TICK_NEVER. */
struct access {
    uint32_t reference_count;
    uint32_t slot;
    uint64_t tick;
    uint64_t lo, hi;
    uint64_t accessed_bytes; /* number of accessed bytes of a strided access; 0 for other accesses */
    struct operation *operation;
    PyObject *object; /* the MemoryAccess that Python code got for this access; NULL if it got none */
    uint8_t mode;
    uint8_t precision;
};

/* Return a new access that shares the operation, or NULL with an exception. */
struct access *access_new(struct operation *operation, uint32_t slot, uint64_t tick, uint64_t lo, uint64_t hi,
                          uint8_t mode, uint8_t precision);
void access_release(struct access *access);

static inline struct access *access_share(struct access *access)
{
    access->reference_count++;
    return access;
}

/* Return the MemoryAccess for an access, always the same object, as a borrowed reference; NULL with an exception.
 * `type` is clocks.MemoryAccess. */
PyObject *access_object(struct access *access, PyObject *type);

/* Set the number of accessed bytes of a strided access. Return -1 with an exception on errors. */
int access_set_accessed_bytes(struct access *access, uint64_t accessed_bytes);

/* Return whether an access happens before the operation that has the clock. */
static inline bool access_is_ordered(const struct access *access, const struct clock *clock)
{
    return access->slot < (uint64_t)clock->width && access->tick <= clock->ticks[access->slot];
}

/* Return whether two accesses race with the same accesses and are reported in the same way; either may be NULL. */
bool accesses_are_equivalent(const struct access *first, const struct access *second);

/* Accesses in the order in which they were stored. A single access, the usual case, needs no array. */
struct access_list {
    uint32_t access_count;
    union {
        struct access *single;    /* the only access, if access_count is 1 */
        struct access **accesses; /* all accesses, if access_count is greater than 1 */
    };
};

static inline struct access *const *access_list_items(const struct access_list *list)
{
    return list->access_count == 1 ? &list->single : list->accesses;
}

/* Release all accesses of a list, and empty it. */
void access_list_clear(struct access_list *list);
/* Make a new list share the accesses of another one. Return -1 with an exception if memory runs out. */
int access_list_copy(struct access_list *new_list, const struct access_list *list);
/* Remove the accesses that happen before the clock, and append `new_access` (which is shared) unless it is NULL.
 * Return -1 with an exception if there is no memory for the added access. */
int access_list_replace_ordered(struct access_list *list, const struct clock *clock, struct access *new_access);
bool access_lists_are_equivalent(const struct access_list *first, const struct access_list *second);

#endif
