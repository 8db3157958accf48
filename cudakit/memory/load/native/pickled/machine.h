/* The pickle machine: its state, and functions that read the file and the stack. tree.h has the overview. */

#ifndef CUDAKIT_READER_MACHINE_H
#define CUDAKIT_READER_MACHINE_H

#include "tree.h"

typedef struct {
    Tree *tree;
    const uint8_t *data;
    uint64_t size;         /* number of bytes of data */
    uint64_t at;           /* position of the next byte */
    uint64_t opcode_at;    /* position of the current opcode */
    Vector stack;          /* Values */
    Vector marks;          /* positions in the stack, as uint64_t */
    Vector memo;           /* Values; 0 for an index that is not set */
    uint64_t memoized;     /* number of memo entries that are set */
    const char *failure;   /* the reason word, a key of _DAMAGE_REASONS in pickled.py */
    PyObject *convert;     /* _convert_for_native of native.py */
    PyThreadState *thread; /* the saved thread state while the interpreter lock is released */
} Machine;

/* Runs a pickle and fills the tree; false with m->failure set if the pickle is rejected. Releases
 * the interpreter lock. */
bool run_machine(Machine *m);

/* Sets the reason why the machine stops; returns false. */
static inline bool fail(Machine *m, const char *reason)
{
    m->failure = reason;
    return false;
}

static inline bool out_of_memory(Machine *m)
{
    return fail(m, "memory");
}

/* Functions that read the bytes of the file. */

static inline uint64_t little_endian(const uint8_t *bytes, int width)
{
    uint64_t number = 0;
    for (int i = 0; i < width; i++)
        number |= (uint64_t)bytes[i] << (8 * i);
    return number;
}

static inline bool skip_bytes(Machine *m, uint64_t count)
{
    if (count > m->size - m->at)
        return fail(m, "truncated");
    m->at += count;
    return true;
}

static inline bool read_unsigned(Machine *m, int width, uint64_t *number)
{
    if (!skip_bytes(m, (uint64_t)width))
        return false;
    *number = little_endian(m->data + m->at - width, width);
    return true;
}

/* Functions for the stack. As in Python's unpickler, opcodes cannot reach values below the latest mark. */
static inline Value *stack_at(const Machine *m, uint64_t index)
{
    return &ITEMS(Value, m->stack)[index];
}

static inline uint64_t stack_floor(const Machine *m)
{
    return m->marks.used ? ITEMS(uint64_t, m->marks)[m->marks.used - 1] : 0;
}

static inline bool push(Machine *m, Value value)
{
    return append_word(&m->stack, value) || out_of_memory(m);
}

static inline bool require_values(Machine *m, uint64_t count)
{
    return m->stack.used - stack_floor(m) >= count || fail(m, "stack");
}

#endif
