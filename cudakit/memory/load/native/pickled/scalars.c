#include "machine.h"

#include <string.h>

/* Reads a length field of `width` bytes, then a span of this length. */
static bool read_counted(Machine *m, int width, Span *span)
{
    if (!read_unsigned(m, width, &span->size) || !skip_bytes(m, span->size))
        return false;
    span->offset = m->at - span->size;
    return true;
}

static bool read_line(Machine *m, Span *span)
{
    const uint8_t *start = m->data + m->at;
    const uint8_t *end = m->at < m->size ? memchr(start, '\n', m->size - m->at) : NULL;
    if (!end)
        return fail(m, "truncated");
    *span = (Span){m->at, (uint64_t)(end - start)};
    m->at += span->size + 1;
    return true;
}

static bool push_blob(Machine *m, int tag, Span span)
{
    uint32_t blob = intern_blob(m->tree, span);
    return blob == NOT_FOUND ? out_of_memory(m) : push(m, MAKE(tag, blob));
}

/* Returns whether the last byte only repeats the sign, so that the number is the same without it. */
static bool repeats_sign(const uint8_t *bytes, uint64_t size)
{
    bool is_negative = size > 1 && bytes[size - 2] & 0x80;
    return size && bytes[size - 1] == (is_negative ? 0xff : 0);
}

static bool push_integer(Machine *m, Span span)
{
    const uint8_t *bytes = bytes_of(m->tree, span);
    while (repeats_sign(bytes, span.size))
        span.size--;
    int64_t number = span.size <= 8 ? decode_signed(bytes, span.size) : 0;
    if (span.size > 8 || small_int(PAYLOAD((uint64_t)number)) != number)
        return push_blob(m, BIG_INT, span);
    return push_small_int(m, number);
}

bool push_long(Machine *m, int width)
{
    Span span;
    return read_counted(m, width, &span) && push_integer(m, span);
}

bool push_bytes(Machine *m, int width)
{
    Span span;
    return read_counted(m, width, &span) && push_blob(m, BYTES, span);
}

bool push_binfloat(Machine *m)
{
    Span span = {m->at, 8};
    return skip_bytes(m, 8) && push_blob(m, FLOAT, span);
}

/* Rare scalars: arguments that are lines of text, and texts that are not ASCII. A Python function
 * converts them, the same one as for the machine in Python. */

static bool push_stored(Machine *m, int tag, const void *bytes, uint64_t size)
{
    Span span;
    if (!store_converted(m->tree, bytes, size, &span))
        return out_of_memory(m);
    return tag == BIG_INT ? push_integer(m, span) : push_blob(m, tag, span);
}

/* Pushes the result of m->convert: a bool, a float, a str, or an integer as little-endian bytes. */
static bool push_object(Machine *m, PyObject *object)
{
    Py_ssize_t size;
    char packed_float[8];
    if (PyBool_Check(object))
        return push(m, MAKE(CONSTANT, object == Py_True ? IS_TRUE : IS_FALSE));
    if (PyBytes_Check(object)) {
        size = PyBytes_GET_SIZE(object);
        return push_stored(m, BIG_INT, PyBytes_AS_STRING(object), (uint64_t)size);
    }
    if (PyFloat_Check(object)) {
        bool is_pushed = PyFloat_Pack8(PyFloat_AS_DOUBLE(object), packed_float, 0) == 0;
        return is_pushed ? push_stored(m, FLOAT, packed_float, sizeof packed_float) : fail(m, "raised");
    }
    const char *text = PyUnicode_AsUTF8AndSize(object, &size);
    return text ? push_stored(m, TEXT, text, (uint64_t)size) : fail(m, "raised");
}

static bool push_converted(Machine *m, Span span)
{
    PyEval_RestoreThread(m->thread);
    PyObject *object = PyObject_CallFunction(m->convert, "iy#", m->data[m->opcode_at], m->data + span.offset,
                                             (Py_ssize_t)span.size);
    bool is_pushed = object ? push_object(m, object) : fail(m, "raised");
    if (!object && PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear();
        fail(m, "argument");
    }
    Py_XDECREF(object);
    m->thread = PyEval_SaveThread();
    return is_pushed;
}

bool push_line_argument(Machine *m)
{
    Span span;
    return read_line(m, &span) && push_converted(m, span);
}

bool push_text(Machine *m, int width)
{
    Span span;
    if (!read_counted(m, width, &span))
        return false;
    for (uint64_t i = 0; i < span.size; i++)
        if (m->data[span.offset + i] >= 0x80)
            return push_converted(m, span);
    return push_blob(m, TEXT, span);
}
