/* The pickle machine: its stack, and how it takes bytes. Used by machine.c and scalars.c. */

#ifndef CUDAKIT_READER_MACHINE_H
#define CUDAKIT_READER_MACHINE_H

#include "tree.h"

typedef struct {
    Tree *tree;
    const uint8_t *data;
    uint64_t size, at, opcode_at;
    Vector stack, marks, memo; /* Value, uint64_t, Value */
    uint64_t memoized;         /* entries of the memo in use */
    const char *failure;
    PyObject *convert;     /* see push_line */
    PyThreadState *thread; /* while the interpreter lock is released */
} Machine;

/* Reads a pickle into the tree; false with m->failure set to the reason, a word of pickled.py. The
 * interpreter lock is released. */
bool run_machine(Machine *m);

/* Records why the machine stops. */
static inline bool fail(Machine *m, const char *why)
{
    m->failure = why;
    return false;
}

static inline bool out_of_memory(Machine *m)
{
    return fail(m, "memory");
}

/* Takes bytes from the file. */
static inline uint64_t little_endian(const uint8_t *bytes, int width)
{
    uint64_t number = 0;
    for (int i = 0; i < width; i++)
        number |= (uint64_t)bytes[i] << (8 * i);
    return number;
}

static inline bool take(Machine *m, uint64_t count)
{
    if (count > m->size - m->at)
        return fail(m, "cut");
    m->at += count;
    return true;
}

static inline bool take_number(Machine *m, int width, uint64_t *number)
{
    if (!take(m, (uint64_t)width))
        return false;
    *number = little_endian(m->data + m->at - width, width);
    return true;
}

/* The stack. Values below the latest mark cannot be reached, as in Python's own unpickler. */
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
    return append(&m->stack, value) || out_of_memory(m);
}

static inline bool needs(Machine *m, uint64_t count)
{
    return m->stack.used - stack_floor(m) >= count || fail(m, "stack");
}

/* Scalars: each takes its argument from the file and pushes a value. */
static inline bool push_small(Machine *m, int64_t number)
{
    return push(m, MAKE(SMALL, PAYLOAD((uint64_t)number)));
}

bool push_long(Machine *m, int width);  /* an integer; its length has so many bytes */
bool push_bytes(Machine *m, int width); /* the same for bytes */
bool push_text(Machine *m, int width);  /* the same for a text */
bool push_binfloat(Machine *m);
bool push_line(Machine *m); /* a line of text, converted by m->convert, a function in Python */

#endif
