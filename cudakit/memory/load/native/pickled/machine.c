/* The opcodes of the pickle machine. Opcodes that look up a class or call anything are rejected. */

#include "machine.h"

#include <string.h>

enum {
    OP_MARK = '(',
    OP_STOP = '.',
    OP_POP = '0',
    OP_POP_MARK = '1',
    OP_DUP = '2',
    OP_FLOAT = 'F',
    OP_INT = 'I',
    OP_BININT = 'J',
    OP_BININT1 = 'K',
    OP_LONG = 'L',
    OP_BININT2 = 'M',
    OP_NONE = 'N',
    OP_STRING = 'S',
    OP_BINSTRING = 'T',
    OP_SHORT_BINSTRING = 'U',
    OP_UNICODE = 'V',
    OP_BINUNICODE = 'X',
    OP_APPEND = 'a',
    OP_DICT = 'd',
    OP_EMPTY_DICT = '}',
    OP_APPENDS = 'e',
    OP_GET = 'g',
    OP_BINGET = 'h',
    OP_LONG_BINGET = 'j',
    OP_LIST = 'l',
    OP_EMPTY_LIST = ']',
    OP_PUT = 'p',
    OP_BINPUT = 'q',
    OP_LONG_BINPUT = 'r',
    OP_SETITEM = 's',
    OP_TUPLE = 't',
    OP_EMPTY_TUPLE = ')',
    OP_SETITEMS = 'u',
    OP_BINFLOAT = 'G',
    OP_BINBYTES = 'B',
    OP_SHORT_BINBYTES = 'C',
    OP_PROTO = 0x80,
    OP_TUPLE1 = 0x85,
    OP_TUPLE2 = 0x86,
    OP_TUPLE3 = 0x87,
    OP_NEWTRUE = 0x88,
    OP_NEWFALSE = 0x89,
    OP_LONG1 = 0x8a,
    OP_LONG4 = 0x8b,
    OP_SHORT_BINUNICODE = 0x8c,
    OP_BINUNICODE8 = 0x8d,
    OP_BINBYTES8 = 0x8e,
    OP_MEMOIZE = 0x94,
    OP_FRAME = 0x95,
};

#define HIGHEST_PROTOCOL 5

/* --- scalars ------------------------------------------------------------------------------------- */

/* Pushes a number; the functions below read an argument from the file and push its value. `width` is the size of the
 * length field in bytes. */
static bool push_small_int(Machine *m, int64_t number)
{
    return push(m, MAKE(SMALL_INT, PAYLOAD((uint64_t)number)));
}

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

static bool push_long(Machine *m, int width)
{
    Span span;
    return read_counted(m, width, &span) && push_integer(m, span);
}

static bool push_bytes(Machine *m, int width)
{
    Span span;
    return read_counted(m, width, &span) && push_blob(m, BYTES, span);
}

static bool push_binfloat(Machine *m)
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

static bool push_line_argument(Machine *m)
{
    Span span;
    return read_line(m, &span) && push_converted(m, span);
}

static bool push_text(Machine *m, int width)
{
    Span span;
    if (!read_counted(m, width, &span))
        return false;
    for (uint64_t i = 0; i < span.size; i++)
        if (m->data[span.offset + i] >= 0x80)
            return push_converted(m, span);
    return push_blob(m, TEXT, span);
}

/* --- the stack ------------------------------------------------------------------------------------ */

static bool pop_mark(Machine *m, uint64_t *position)
{
    if (!m->marks.used)
        return fail(m, "mark");
    *position = stack_floor(m);
    m->marks.used--;
    return true;
}

static bool pop(Machine *m)
{
    uint64_t position;
    if (m->marks.used && m->stack.used == stack_floor(m))
        return pop_mark(m, &position);
    if (!require_values(m, 1))
        return false;
    m->stack.used--;
    return true;
}

/* Opcodes that store and push memo values. */

static bool memo_put(Machine *m, uint64_t index)
{
    if (!require_values(m, 1))
        return false;
    if (index >= m->at)
        return fail(m, "memo_index");
    if (index >= m->memo.used) {
        uint64_t missing_items = index + 1 - m->memo.used;
        if (!reserve(&m->memo, missing_items, sizeof(Value)))
            return out_of_memory(m);
        memset(ITEMS(Value, m->memo) + m->memo.used, 0, missing_items * sizeof(Value));
        m->memo.used += missing_items;
    }
    Value *memo_entry = &ITEMS(Value, m->memo)[index];
    m->memoized += !*memo_entry;
    *memo_entry = *stack_at(m, m->stack.used - 1);
    return true;
}

static bool memo_get(Machine *m, uint64_t index)
{
    Value value = index < m->memo.used ? ITEMS(Value, m->memo)[index] : 0;
    return value ? push(m, value) : fail(m, "memo");
}

/* Executes the BINGET and LONG_BINGET opcodes that follow, in a fast loop: most bytes of a snapshot
 * are call stacks, that is, runs of memoized frames. Leaves all other cases to `step`. */
static bool memo_get_run(Machine *m)
{
    const uint8_t *at = m->data + m->at, *end = m->data + m->size;
    const Value *memo = m->memo.data;
    Value *top = stack_at(m, m->stack.used), *stack_limit = stack_at(m, m->stack.capacity);
    uint64_t memo_size = m->memo.used;
    while (top < stack_limit && end - at > 4) {
        uint64_t index = at[1], width = 1;
        if (*at == OP_LONG_BINGET)
            index = little_endian(at + 1, 4), width = 4;
        else if (*at != OP_BINGET)
            break;
        if (index >= memo_size || !memo[index])
            break;
        *top++ = memo[index];
        at += 1 + width;
    }
    m->stack.used = (uint64_t)(top - stack_at(m, 0));
    m->at = (uint64_t)(at - m->data);
    return true;
}

/* Reads a memo index in decimal. An index of more than 60 bits becomes UINT64_MAX: no memo has it. */
static bool read_index_line(Machine *m, uint64_t *index)
{
    if (!push_line_argument(m))
        return false;
    Value value = *stack_at(m, --m->stack.used);
    *index = TAG(value) == SMALL_INT ? PAYLOAD(value) : UINT64_MAX;
    return true;
}

/* Opcodes that create and fill lists and dictionaries. */

static bool push_list(Machine *m)
{
    Vector *lists = &m->tree->lists;
    if (lists->used >= NOT_FOUND - 1 || !reserve(lists, 1, sizeof(List)))
        return out_of_memory(m);
    ITEMS(List, *lists)[lists->used] = (List){0};
    return push(m, MAKE(LIST, lists->used++));
}

static bool push_dict(Machine *m)
{
    Vector *dicts = &m->tree->dicts;
    if (dicts->used >= NOT_FOUND - 1 || !reserve(dicts, 1, sizeof(Dict)))
        return out_of_memory(m);
    ITEMS(Dict, *dicts)[dicts->used] = (Dict){0};
    return push(m, MAKE(DICT, dicts->used++));
}

/* Moves the values from a stack position on into the list below them. */
static bool append_from(Machine *m, uint64_t position)
{
    Value container = *stack_at(m, position - 1);
    if (TAG(container) != LIST)
        return fail(m, "target");
    List *list = list_at(m->tree, container);
    uint64_t new_items = m->stack.used - position;
    if (!grow_items(m->tree, &list->items, &list->capacity, list->length, new_items))
        return out_of_memory(m);
    if (new_items)
        memcpy(list->items + list->length, stack_at(m, position), new_items * sizeof(Value));
    list->length += (uint32_t)new_items;
    m->stack.used = position;
    return true;
}

/* Moves key-value pairs from a stack position on into the dictionary below them. Drops keys that are
 * not text, with their values: no query can name them. A repeated key is added again; queries return
 * its last value. */
static bool set_from(Machine *m, uint64_t position)
{
    Tree *tree = m->tree;
    Value container = *stack_at(m, position - 1);
    uint64_t value_count = m->stack.used - position;
    if (TAG(container) != DICT)
        return fail(m, "target");
    if (value_count % 2)
        return fail(m, "pairs");
    Dict *dict = dict_at(tree, container);
    uint32_t length = shape_at(tree, dict->shape)->length;
    if (!grow_items(tree, &dict->values, &dict->capacity, length, value_count / 2))
        return out_of_memory(m);
    for (const Value *pair = stack_at(m, position), *end = pair + value_count; pair < end; pair += 2) {
        if (TAG(pair[0]) != TEXT)
            continue;
        uint32_t shape = shape_with_key(tree, dict->shape, (uint32_t)PAYLOAD(pair[0]));
        if (shape == NOT_FOUND)
            return out_of_memory(m);
        dict->shape = shape;
        dict->values[length++] = pair[1];
    }
    m->stack.used = position;
    return true;
}

typedef bool (*FillFunction)(Machine *, uint64_t);

static bool fill_last(Machine *m, uint64_t count, FillFunction fill)
{
    return require_values(m, count + 1) && fill(m, m->stack.used - count);
}

static bool fill_from_mark(Machine *m, FillFunction fill)
{
    uint64_t position;
    if (!pop_mark(m, &position))
        return false;
    return position > stack_floor(m) ? fill(m, position) : fail(m, "stack");
}

/* Makes a container of the values from a stack position on: inserts an empty container below them and
 * fills it. */
static bool make_from(Machine *m, uint64_t position, bool (*push_empty)(Machine *), FillFunction fill)
{
    uint64_t value_count = m->stack.used - position;
    if (!push_empty(m))
        return false;
    Value container = *stack_at(m, position + value_count);
    memmove(stack_at(m, position + 1), stack_at(m, position), value_count * sizeof(Value));
    *stack_at(m, position) = container;
    return fill(m, position + 1);
}

static bool make_from_mark(Machine *m, bool (*push_empty)(Machine *), FillFunction fill)
{
    uint64_t position;
    return pop_mark(m, &position) && make_from(m, position, push_empty, fill);
}

static bool make_tuple(Machine *m, uint64_t count)
{
    return require_values(m, count) && make_from(m, m->stack.used - count, push_list, append_from);
}

/* Opcodes of the protocol version and of frames. */

static bool check_protocol(Machine *m)
{
    uint64_t version;
    return read_unsigned(m, 1, &version) && (version <= HIGHEST_PROTOCOL || fail(m, "protocol"));
}

/* A frame that is longer than the rest of the file means that the file is truncated. */
static bool check_frame(Machine *m)
{
    uint64_t size;
    return read_unsigned(m, 8, &size) && (size <= m->size - m->at || fail(m, "truncated"));
}

static bool step(Machine *m, uint8_t opcode)
{
    uint64_t n = 0;
    switch (opcode) {
    case OP_BINGET: return read_unsigned(m, 1, &n) && memo_get(m, n) && memo_get_run(m);
    case OP_LONG_BINGET: return read_unsigned(m, 4, &n) && memo_get(m, n) && memo_get_run(m);
    case OP_GET: return read_index_line(m, &n) && memo_get(m, n);
    case OP_MEMOIZE: return memo_put(m, m->memoized);
    case OP_BINPUT: return read_unsigned(m, 1, &n) && memo_put(m, n);
    case OP_LONG_BINPUT: return read_unsigned(m, 4, &n) && memo_put(m, n);
    case OP_PUT: return read_index_line(m, &n) && memo_put(m, n);
    case OP_BININT1: return read_unsigned(m, 1, &n) && push_small_int(m, (int64_t)n);
    case OP_BININT2: return read_unsigned(m, 2, &n) && push_small_int(m, (int64_t)n);
    case OP_BININT: return read_unsigned(m, 4, &n) && push_small_int(m, (int32_t)(uint32_t)n);
    case OP_LONG1: return push_long(m, 1);
    case OP_LONG4: return push_long(m, 4);
    case OP_NONE: return push(m, MAKE(CONSTANT, IS_NONE));
    case OP_NEWTRUE: return push(m, MAKE(CONSTANT, IS_TRUE));
    case OP_NEWFALSE: return push(m, MAKE(CONSTANT, IS_FALSE));
    case OP_BINFLOAT: return push_binfloat(m);
    case OP_SHORT_BINUNICODE:
    case OP_SHORT_BINSTRING: return push_text(m, 1);
    case OP_BINUNICODE:
    case OP_BINSTRING: return push_text(m, 4);
    case OP_BINUNICODE8: return push_text(m, 8);
    case OP_SHORT_BINBYTES: return push_bytes(m, 1);
    case OP_BINBYTES: return push_bytes(m, 4);
    case OP_BINBYTES8: return push_bytes(m, 8);
    case OP_INT:
    case OP_LONG:
    case OP_FLOAT:
    case OP_STRING:
    case OP_UNICODE: return push_line_argument(m);
    case OP_EMPTY_DICT: return push_dict(m);
    case OP_SETITEM: return fill_last(m, 2, set_from);
    case OP_SETITEMS: return fill_from_mark(m, set_from);
    case OP_DICT: return make_from_mark(m, push_dict, set_from);
    case OP_EMPTY_TUPLE:
    case OP_EMPTY_LIST: return push_list(m);
    case OP_APPEND: return fill_last(m, 1, append_from);
    case OP_APPENDS: return fill_from_mark(m, append_from);
    case OP_TUPLE1: return make_tuple(m, 1);
    case OP_TUPLE2: return make_tuple(m, 2);
    case OP_TUPLE3: return make_tuple(m, 3);
    case OP_TUPLE:
    case OP_LIST: return make_from_mark(m, push_list, append_from);
    case OP_MARK: return append_word(&m->marks, m->stack.used) || out_of_memory(m);
    case OP_POP: return pop(m);
    case OP_POP_MARK: return pop_mark(m, &m->stack.used);
    case OP_DUP: return require_values(m, 1) && push(m, *stack_at(m, m->stack.used - 1));
    case OP_PROTO: return check_protocol(m);
    case OP_FRAME: return check_frame(m);
    default: return fail(m, "opcode");
    }
}

static bool check_memory(Machine *m)
{
    uint64_t word_count = m->stack.capacity + m->marks.capacity + m->memo.capacity;
    bool is_within_limit = tree_bytes(m->tree) + word_count * sizeof(uint64_t) <= m->tree->memory_limit;
    return is_within_limit || fail(m, "memory_limit");
}

static bool execute(Machine *m)
{
    for (uint64_t opcode_count = 1;; opcode_count++) {
        m->opcode_at = m->at;
        if (opcode_count % CHECK_INTERVAL == 0 && !check_memory(m))
            return false;
        if (!skip_bytes(m, 1))
            return false;
        uint8_t opcode = m->data[m->opcode_at];
        if (opcode == OP_STOP)
            break;
        if (!step(m, opcode))
            return false;
    }
    if (!require_values(m, 1))
        return false;
    m->tree->root = *stack_at(m, m->stack.used - 1);
    return true;
}

bool run_machine(Machine *m)
{
    Tree *tree = m->tree;
    m->thread = PyEval_SaveThread();
    bool is_running = reserve(&tree->shapes, 1, sizeof(Shape)) || out_of_memory(m);
    if (is_running) {
        *shape_at(tree, (uint32_t)tree->shapes.used++) = (Shape){0};
        is_running = execute(m);
    }
    PyMem_RawFree(m->stack.data);
    PyMem_RawFree(m->marks.data);
    PyMem_RawFree(m->memo.data);
    PyEval_RestoreThread(m->thread);
    return is_running;
}
