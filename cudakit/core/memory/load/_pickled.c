/* Reads a pickle of plain data into flat memory: no class is looked up, nothing is called, and no
 * Python object is made for a node. A file can do nothing but describe lists, dictionaries, texts
 * and numbers. Memory and time are linear in its bytes: an opcode stores a bounded amount, a
 * declared length is compared with what is left before it is believed, and a memo index must be
 * smaller than the number of bytes read so far.
 *
 * A node is a Value: a tag in the upper four bits, and below it what the tag says. Scalars of equal
 * content have equal Values, since what does not fit in 60 bits is interned. A dictionary is its
 * shape (which keys in which order: a path in a tree that all dictionaries share) and its values.
 *
 * What a file does wrong leaves as ValueError(word, offset), of which pickled.py makes a sentence.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ---- growing arrays -------------------------------------------------------------------------- */

typedef struct {
    void *data;
    uint64_t used, capacity; /* in items */
} Vector;

#define ITEMS(type, vector) ((type *)(vector).data)

static bool grow(Vector *vector, uint64_t needed, size_t item_bytes) {
    uint64_t capacity = vector->capacity + vector->capacity / 2;
    if (capacity < needed)
        capacity = needed + 15;
    void *data = NULL;
    if (capacity <= PTRDIFF_MAX / item_bytes)
        data = PyMem_RawRealloc(vector->data, capacity * item_bytes);
    if (!data)
        return false;
    vector->data = data;
    vector->capacity = capacity;
    return true;
}

static inline bool reserve(Vector *vector, uint64_t extra, size_t item_bytes) {
    uint64_t needed = vector->used + extra;
    return needed <= vector->capacity || grow(vector, needed, item_bytes);
}

static inline bool append(Vector *words, uint64_t word) {
    if (!reserve(words, 1, sizeof word))
        return false;
    ITEMS(uint64_t, *words)[words->used++] = word;
    return true;
}

/* ---- hashing --------------------------------------------------------------------------------- */

static inline uint64_t rotated(uint64_t word, int bits) {
    return word << bits | word >> (64 - bits);
}

static inline void sip_round(uint64_t v[4]) {
    v[0] += v[1], v[1] = rotated(v[1], 13) ^ v[0], v[0] = rotated(v[0], 32);
    v[2] += v[3], v[3] = rotated(v[3], 16) ^ v[2];
    v[0] += v[3], v[3] = rotated(v[3], 21) ^ v[0];
    v[2] += v[1], v[1] = rotated(v[1], 17) ^ v[2], v[2] = rotated(v[2], 32);
}

/* SipHash-1-3 (Aumasson and Bernstein, 2012): without the key, a file cannot be made to collide. */
static uint32_t hash_bytes(const uint64_t key[2], const void *data, uint64_t size) {
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575, key[1] ^ 0x646f72616e646f6d,
                     key[0] ^ 0x6c7967656e657261, key[1] ^ 0x7465646279746573};
    const uint8_t *bytes = data;
    uint64_t left = size, word;
    for (; left >= 8; left -= 8, bytes += 8) {
        memcpy(&word, bytes, 8);
        v[3] ^= word;
        sip_round(v);
        v[0] ^= word;
    }
    word = size << 56;
    for (uint64_t i = 0; i < left; i++)
        word |= (uint64_t)bytes[i] << (8 * i);
    v[3] ^= word;
    sip_round(v);
    v[0] ^= word;
    v[2] ^= 0xff;
    sip_round(v), sip_round(v), sip_round(v);
    return (uint32_t)(v[0] ^ v[1] ^ v[2] ^ v[3]);
}

/* An open-addressing set of indices; its owner knows what an index stands for. A slot is the hash
 * (upper half) and the index + 1 (lower half); the number of slots is a power of two. */
typedef struct {
    uint64_t *slots;
    uint64_t size, used;
} Table;

#define NOTHING UINT32_MAX

/* Gives one index after another that may be the one looked for, then NOTHING. */
static inline uint32_t table_next(const Table *table, uint32_t hash, uint64_t *position) {
    while (table->size) {
        uint64_t slot = table->slots[*position & (table->size - 1)];
        if (!slot)
            break;
        ++*position;
        if (slot >> 32 == hash)
            return (uint32_t)slot - 1;
    }
    return NOTHING;
}

static void table_place(Table *table, uint64_t slot) {
    uint64_t position = slot >> 32;
    while (table->slots[position & (table->size - 1)])
        position++;
    table->slots[position & (table->size - 1)] = slot;
}

static bool table_grow(Table *table) {
    Table larger = {NULL, table->size ? table->size * 2 : 64, table->used};
    larger.slots = PyMem_RawCalloc(larger.size, sizeof(uint64_t));
    if (!larger.slots)
        return false;
    for (uint64_t i = 0; i < table->size; i++)
        if (table->slots[i])
            table_place(&larger, table->slots[i]);
    PyMem_RawFree(table->slots);
    *table = larger;
    return true;
}

static bool table_add(Table *table, uint32_t hash, uint64_t index) {
    if (index >= NOTHING - 1 || (table->used * 3 >= table->size * 2 && !table_grow(table)))
        return false;
    table_place(table, (uint64_t)hash << 32 | (index + 1));
    table->used++;
    return true;
}

/* ---- the tree -------------------------------------------------------------------------------- */

typedef uint64_t Value;

enum {
    ABSENT,   /* the handle 0 */
    CONSTANT, /* IS_NONE, IS_FALSE or IS_TRUE */
    SMALL,    /* an integer of 60 bits */
    NUMBER,   /* a blob: a larger integer, in little-endian two's complement, as short as can be */
    FLOAT,    /* a blob: big-endian binary64, so that equal content means equal bits */
    TEXT,     /* a blob: valid UTF-8 */
    BYTES,    /* a blob */
    LIST,     /* an index into Tree.lists; tuples are lists */
    DICT,     /* an index into Tree.dicts */
    CONTENT,  /* while interning: the number of a content */
};

enum { IS_NONE, IS_FALSE, IS_TRUE };

#define PAYLOAD_BITS 60
#define PAYLOAD(value) ((value) & (((uint64_t)1 << PAYLOAD_BITS) - 1))
#define TAG(value) ((int)((value) >> PAYLOAD_BITS))
#define MAKE(tag, payload) ((Value)(tag) << PAYLOAD_BITS | (payload))

typedef struct {
    uint64_t offset, size; /* in the file, or with IN_SPILL set in Tree.spill */
} Span;

#define IN_SPILL ((uint64_t)1 << 63)

typedef struct {
    Value *items;
    uint32_t length, capacity;
} List;

typedef struct {
    Value *values;
    uint32_t shape, capacity; /* the shape knows the length */
} Dict;

typedef struct {
    uint32_t parent, key; /* one key, a blob, more than the parent */
    uint32_t length;
    uint32_t successor; /* the latest child: a guess that spares most look-ups */
} Shape;

typedef struct Chunk {
    struct Chunk *next;
    Value items[];
} Chunk;

#define CHUNK_ITEMS ((uint64_t)1 << 17)

typedef struct {
    PyObject_HEAD
    Py_buffer file;
    uint64_t hash_key[2];
    Vector blobs;  /* Span */
    Vector spill;  /* bytes of scalars that do not stand in the file as they are kept */
    Vector lists;  /* List */
    Vector dicts;  /* Dict */
    Vector shapes; /* Shape; the first is the empty one */
    Table blob_table, shape_table;
    Chunk *chunks; /* where the items of lists and the values of dictionaries are */
    Value *free_items;
    uint64_t free_count;
    Value root;
} Tree;

static inline Span blob_at(const Tree *tree, Value value) {
    return ITEMS(Span, tree->blobs)[PAYLOAD(value)];
}

static inline List *list_at(const Tree *tree, Value value) {
    return &ITEMS(List, tree->lists)[PAYLOAD(value)];
}

static inline Dict *dict_at(const Tree *tree, Value value) {
    return &ITEMS(Dict, tree->dicts)[PAYLOAD(value)];
}

static inline Shape *shape_at(const Tree *tree, uint32_t index) {
    return &ITEMS(Shape, tree->shapes)[index];
}

static const uint8_t *bytes_of(const Tree *tree, Span span) {
    if (span.offset & IN_SPILL)
        return ITEMS(uint8_t, tree->spill) + (span.offset ^ IN_SPILL);
    return (const uint8_t *)tree->file.buf + span.offset;
}

static uint32_t find_blob(const Tree *tree, const void *bytes, uint64_t size, uint32_t hash) {
    uint64_t position = hash;
    for (uint32_t i; (i = table_next(&tree->blob_table, hash, &position)) != NOTHING;) {
        Span known = blob_at(tree, i);
        if (known.size == size && !memcmp(bytes_of(tree, known), bytes, size))
            return i;
    }
    return NOTHING;
}

/* Returns the number of the blob with these bytes; NOTHING without memory. */
static uint32_t intern_blob(Tree *tree, Span span) {
    const uint8_t *bytes = bytes_of(tree, span);
    uint32_t hash = hash_bytes(tree->hash_key, bytes, span.size);
    uint32_t known = find_blob(tree, bytes, span.size, hash);
    if (known != NOTHING)
        return known;
    if (!reserve(&tree->blobs, 1, sizeof(Span))
        || !table_add(&tree->blob_table, hash, tree->blobs.used))
        return NOTHING;
    ITEMS(Span, tree->blobs)[tree->blobs.used] = span;
    return (uint32_t)tree->blobs.used++;
}

static bool spill(Tree *tree, const void *bytes, uint64_t size, Span *span) {
    if (!reserve(&tree->spill, size, 1))
        return false;
    *span = (Span){tree->spill.used | IN_SPILL, size};
    if (size)
        memcpy(ITEMS(uint8_t, tree->spill) + tree->spill.used, bytes, size);
    tree->spill.used += size;
    return true;
}

/* Returns the shape with one key more; NOTHING without memory. */
static uint32_t extended_shape(Tree *tree, uint32_t parent, uint32_t key) {
    Shape *from = shape_at(tree, parent), *guess = shape_at(tree, from->successor);
    if (from->successor && guess->key == key)
        return from->successor;
    uint32_t pair[2] = {parent, key}, hash = hash_bytes(tree->hash_key, pair, sizeof pair);
    uint64_t position = hash;
    for (uint32_t i; (i = table_next(&tree->shape_table, hash, &position)) != NOTHING;)
        if (shape_at(tree, i)->parent == parent && shape_at(tree, i)->key == key)
            return from->successor = i;
    if (!reserve(&tree->shapes, 1, sizeof(Shape))
        || !table_add(&tree->shape_table, hash, tree->shapes.used))
        return NOTHING;
    uint32_t made = (uint32_t)tree->shapes.used++;
    *shape_at(tree, made) = (Shape){parent, key, shape_at(tree, parent)->length + 1, 0};
    return shape_at(tree, parent)->successor = made;
}

/* A chunk is left for another when a request exceeds what is left of it: half is used at least. */
static Value *allocate_items(Tree *tree, uint64_t count) {
    if (count > tree->free_count) {
        uint64_t size = count > CHUNK_ITEMS ? count : CHUNK_ITEMS;
        Chunk *chunk = PyMem_RawMalloc(sizeof(Chunk) + size * sizeof(Value));
        if (!chunk)
            return NULL;
        chunk->next = tree->chunks;
        tree->chunks = chunk;
        tree->free_items = chunk->items;
        tree->free_count = size;
    }
    Value *items = tree->free_items;
    tree->free_items += count;
    tree->free_count -= count;
    return items;
}

/* Makes room for more items behind length others. The first batch gets exactly its size, since most
 * containers have one only; after that capacity doubles. */
static bool extend(Tree *tree, Value **items, uint32_t *capacity, uint32_t length, uint64_t extra) {
    uint64_t needed = length + extra, wanted = 2 * (uint64_t)*capacity;
    if (needed <= *capacity)
        return true;
    if (wanted < needed)
        wanted = needed;
    Value *larger = wanted < NOTHING ? allocate_items(tree, wanted) : NULL;
    if (!larger)
        return false;
    if (length)
        memcpy(larger, *items, length * sizeof(Value));
    *items = larger;
    *capacity = (uint32_t)wanted;
    return true;
}

/* ---- the pickle machine ---------------------------------------------------------------------- */

enum {
    OP_MARK = '(', OP_STOP = '.', OP_POP = '0', OP_POP_MARK = '1', OP_DUP = '2', OP_FLOAT = 'F',
    OP_INT = 'I', OP_BININT = 'J', OP_BININT1 = 'K', OP_LONG = 'L', OP_BININT2 = 'M', OP_NONE = 'N',
    OP_STRING = 'S', OP_BINSTRING = 'T', OP_SHORT_BINSTRING = 'U', OP_UNICODE = 'V',
    OP_BINUNICODE = 'X', OP_APPEND = 'a', OP_DICT = 'd', OP_EMPTY_DICT = '}', OP_APPENDS = 'e',
    OP_GET = 'g', OP_BINGET = 'h', OP_LONG_BINGET = 'j', OP_LIST = 'l', OP_EMPTY_LIST = ']',
    OP_PUT = 'p', OP_BINPUT = 'q', OP_LONG_BINPUT = 'r', OP_SETITEM = 's', OP_TUPLE = 't',
    OP_EMPTY_TUPLE = ')', OP_SETITEMS = 'u', OP_BINFLOAT = 'G', OP_BINBYTES = 'B',
    OP_SHORT_BINBYTES = 'C', OP_PROTO = 0x80, OP_TUPLE1 = 0x85, OP_TUPLE2 = 0x86, OP_TUPLE3 = 0x87,
    OP_NEWTRUE = 0x88, OP_NEWFALSE = 0x89, OP_LONG1 = 0x8a, OP_LONG4 = 0x8b,
    OP_SHORT_BINUNICODE = 0x8c, OP_BINUNICODE8 = 0x8d, OP_BINBYTES8 = 0x8e, OP_MEMOIZE = 0x94,
    OP_FRAME = 0x95,
};

#define HIGHEST_PROTOCOL 5

typedef struct {
    Tree *tree;
    const uint8_t *data;
    uint64_t size, at, opcode_at;
    Vector stack, marks, memo; /* Value, uint64_t, Value */
    uint64_t memoized;         /* entries of the memo in use */
    const char *failure;
    PyObject *convert;     /* see push_converted */
    PyThreadState *thread; /* while the interpreter lock is given up */
} Machine;

static bool fail(Machine *m, const char *why) {
    m->failure = why;
    return false;
}

static bool out_of_memory(Machine *m) { return fail(m, "memory"); }

/* Arguments. */

static inline uint64_t little_endian(const uint8_t *bytes, int width) {
    uint64_t number = 0;
    for (int i = 0; i < width; i++)
        number |= (uint64_t)bytes[i] << (8 * i);
    return number;
}

static inline bool take(Machine *m, uint64_t count) {
    if (count > m->size - m->at)
        return fail(m, "cut");
    m->at += count;
    return true;
}

static inline bool take_number(Machine *m, int width, uint64_t *number) {
    if (!take(m, (uint64_t)width))
        return false;
    *number = little_endian(m->data + m->at - width, width);
    return true;
}

/* Takes a length of so many bytes, and what has that length. */
static bool take_counted(Machine *m, int width, Span *span) {
    if (!take_number(m, width, &span->size) || !take(m, span->size))
        return false;
    span->offset = m->at - span->size;
    return true;
}

static bool take_line(Machine *m, Span *span) {
    const uint8_t *start = m->data + m->at;
    const uint8_t *end = m->at < m->size ? memchr(start, '\n', m->size - m->at) : NULL;
    if (!end)
        return fail(m, "cut");
    *span = (Span){m->at, (uint64_t)(end - start)};
    m->at += span->size + 1;
    return true;
}

/* The stack. What lies below the latest mark is out of reach, as in Python's own unpickler. */

static inline Value *stack_at(const Machine *m, uint64_t index) {
    return &ITEMS(Value, m->stack)[index];
}

static inline uint64_t fence(const Machine *m) {
    return m->marks.used ? ITEMS(uint64_t, m->marks)[m->marks.used - 1] : 0;
}

static inline bool push(Machine *m, Value value) {
    return append(&m->stack, value) || out_of_memory(m);
}

static inline bool needs(Machine *m, uint64_t count) {
    return m->stack.used - fence(m) >= count || fail(m, "stack");
}

static bool pop_mark(Machine *m, uint64_t *position) {
    if (!m->marks.used)
        return fail(m, "mark");
    *position = fence(m);
    m->marks.used--;
    return true;
}

static bool pop(Machine *m) {
    uint64_t position;
    if (m->marks.used && m->stack.used == fence(m))
        return pop_mark(m, &position);
    if (!needs(m, 1))
        return false;
    m->stack.used--;
    return true;
}

/* Scalars. */

static bool push_blob(Machine *m, int tag, Span span) {
    uint32_t blob = intern_blob(m->tree, span);
    return blob == NOTHING ? out_of_memory(m) : push(m, MAKE(tag, blob));
}

static inline bool push_small(Machine *m, int64_t number) {
    return push(m, MAKE(SMALL, PAYLOAD((uint64_t)number)));
}

static inline int64_t small_number(Value value) {
    return (int64_t)(value << (64 - PAYLOAD_BITS)) >> (64 - PAYLOAD_BITS);
}

/* Reads two's complement of up to eight bytes. */
static int64_t signed_number(const uint8_t *bytes, uint64_t size) {
    uint64_t number = size && bytes[size - 1] & 0x80 ? UINT64_MAX : 0;
    for (uint64_t i = size; i--;)
        number = number << 8 | bytes[i];
    return (int64_t)number;
}

/* Whether the last byte of two's complement only repeats the sign. */
static bool has_needless_byte(const uint8_t *bytes, uint64_t size) {
    bool negative = size > 1 && bytes[size - 2] & 0x80;
    return size && bytes[size - 1] == (negative ? 0xff : 0);
}

static bool push_integer(Machine *m, Span span) {
    const uint8_t *bytes = bytes_of(m->tree, span);
    while (has_needless_byte(bytes, span.size))
        span.size--;
    int64_t number = span.size <= 8 ? signed_number(bytes, span.size) : 0;
    if (span.size > 8 || small_number(PAYLOAD((uint64_t)number)) != number)
        return push_blob(m, NUMBER, span);
    return push_small(m, number);
}

static bool push_long(Machine *m, int width) {
    Span span;
    return take_counted(m, width, &span) && push_integer(m, span);
}

static bool push_bytes(Machine *m, int width) {
    Span span;
    return take_counted(m, width, &span) && push_blob(m, BYTES, span);
}

static bool push_binfloat(Machine *m) {
    Span span = {m->at, 8};
    return take(m, 8) && push_blob(m, FLOAT, span);
}

/* Rare scalars: lines of text, and texts that are not plain ASCII. The function that converts them
 * is in Python, and the machine in Python uses it too. */

static void enter_python(Machine *m) { PyEval_RestoreThread(m->thread); }
static void leave_python(Machine *m) { m->thread = PyEval_SaveThread(); }

static bool push_spilled(Machine *m, int tag, const void *bytes, uint64_t size) {
    Span span;
    if (!spill(m->tree, bytes, size, &span))
        return out_of_memory(m);
    return tag == NUMBER ? push_integer(m, span) : push_blob(m, tag, span);
}

/* Pushes a bool, a float, a str, or an integer given as bytes. */
static bool push_object(Machine *m, PyObject *object) {
    Py_ssize_t size;
    char packed[8];
    if (PyBool_Check(object))
        return push(m, MAKE(CONSTANT, object == Py_True ? IS_TRUE : IS_FALSE));
    if (PyBytes_Check(object)) {
        size = PyBytes_GET_SIZE(object);
        return push_spilled(m, NUMBER, PyBytes_AS_STRING(object), (uint64_t)size);
    }
    if (PyFloat_Check(object)) {
        bool done = PyFloat_Pack8(PyFloat_AS_DOUBLE(object), packed, 0) == 0;
        return done ? push_spilled(m, FLOAT, packed, sizeof packed) : fail(m, "raised");
    }
    const char *text = PyUnicode_AsUTF8AndSize(object, &size);
    return text ? push_spilled(m, TEXT, text, (uint64_t)size) : fail(m, "raised");
}

static bool push_converted(Machine *m, Span span) {
    enter_python(m);
    PyObject *object = PyObject_CallFunction(m->convert, "iy#", m->data[m->opcode_at],
                                             m->data + span.offset, (Py_ssize_t)span.size);
    bool pushed = object ? push_object(m, object) : fail(m, "raised");
    if (!object && PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear();
        fail(m, "argument");
    }
    Py_XDECREF(object);
    leave_python(m);
    return pushed;
}

static bool push_line(Machine *m) {
    Span span;
    return take_line(m, &span) && push_converted(m, span);
}

static bool push_text(Machine *m, int width) {
    Span span;
    if (!take_counted(m, width, &span))
        return false;
    for (uint64_t i = 0; i < span.size; i++)
        if (m->data[span.offset + i] >= 0x80)
            return push_converted(m, span);
    return push_blob(m, TEXT, span);
}

/* The memo. */

static bool memo_put(Machine *m, uint64_t index) {
    if (!needs(m, 1))
        return false;
    if (index >= m->at)
        return fail(m, "far");
    if (index >= m->memo.used) {
        uint64_t extra = index + 1 - m->memo.used;
        if (!reserve(&m->memo, extra, sizeof(Value)))
            return out_of_memory(m);
        memset(ITEMS(Value, m->memo) + m->memo.used, 0, extra * sizeof(Value));
        m->memo.used += extra;
    }
    Value *entry = &ITEMS(Value, m->memo)[index];
    m->memoized += !*entry;
    *entry = *stack_at(m, m->stack.used - 1);
    return true;
}

static bool memo_get(Machine *m, uint64_t index) {
    Value value = index < m->memo.used ? ITEMS(Value, m->memo)[index] : 0;
    return value ? push(m, value) : fail(m, "memo");
}

/* Goes on with the look-ups that follow in a row, with everything in registers: most of a file is
 * stacks of known frames. What is not as expected is left to step. */
static bool memo_get_run(Machine *m) {
    const uint8_t *at = m->data + m->at, *end = m->data + m->size;
    const Value *memo = m->memo.data;
    Value *top = stack_at(m, m->stack.used), *limit = stack_at(m, m->stack.capacity);
    uint64_t known = m->memo.used;
    while (top < limit && end - at > 4) {
        uint64_t index = at[1], width = 1;
        if (*at == OP_LONG_BINGET)
            index = little_endian(at + 1, 4), width = 4;
        else if (*at != OP_BINGET)
            break;
        if (index >= known || !memo[index])
            break;
        *top++ = memo[index];
        at += 1 + width;
    }
    m->stack.used = (uint64_t)(top - stack_at(m, 0));
    m->at = (uint64_t)(at - m->data);
    return true;
}

/* Takes an index in decimal; one beyond 60 bits, which no memo has, becomes the greatest. */
static bool take_index_line(Machine *m, uint64_t *index) {
    if (!push_line(m))
        return false;
    Value value = *stack_at(m, --m->stack.used);
    *index = TAG(value) == SMALL ? PAYLOAD(value) : UINT64_MAX;
    return true;
}

/* Containers. */

static bool push_list(Machine *m) {
    Vector *lists = &m->tree->lists;
    if (lists->used >= NOTHING - 1 || !reserve(lists, 1, sizeof(List)))
        return out_of_memory(m);
    ITEMS(List, *lists)[lists->used] = (List){0};
    return push(m, MAKE(LIST, lists->used++));
}

static bool push_dict(Machine *m) {
    Vector *dicts = &m->tree->dicts;
    if (dicts->used >= NOTHING - 1 || !reserve(dicts, 1, sizeof(Dict)))
        return out_of_memory(m);
    ITEMS(Dict, *dicts)[dicts->used] = (Dict){0};
    return push(m, MAKE(DICT, dicts->used++));
}

/* Moves the stack from a position on into the list before it. */
static bool append_from(Machine *m, uint64_t position) {
    Value target = *stack_at(m, position - 1);
    if (TAG(target) != LIST)
        return fail(m, "target");
    List *list = list_at(m->tree, target);
    uint64_t extra = m->stack.used - position;
    if (!extend(m->tree, &list->items, &list->capacity, list->length, extra))
        return out_of_memory(m);
    if (extra)
        memcpy(list->items + list->length, stack_at(m, position), extra * sizeof(Value));
    list->length += (uint32_t)extra;
    m->stack.used = position;
    return true;
}

/* The same for a dictionary. A key that is not text is dropped with its value, since nothing asks
 * for it. A key that comes again is added again, and the last one counts. */
static bool set_from(Machine *m, uint64_t position) {
    Tree *tree = m->tree;
    Value target = *stack_at(m, position - 1);
    uint64_t count = m->stack.used - position;
    if (TAG(target) != DICT)
        return fail(m, "target");
    if (count % 2)
        return fail(m, "pairs");
    Dict *dict = dict_at(tree, target);
    uint32_t length = shape_at(tree, dict->shape)->length;
    if (!extend(tree, &dict->values, &dict->capacity, length, count / 2))
        return out_of_memory(m);
    for (const Value *pair = stack_at(m, position), *end = pair + count; pair < end; pair += 2) {
        if (TAG(pair[0]) != TEXT)
            continue;
        uint32_t shape = extended_shape(tree, dict->shape, (uint32_t)PAYLOAD(pair[0]));
        if (shape == NOTHING)
            return out_of_memory(m);
        dict->shape = shape;
        dict->values[length++] = pair[1];
    }
    m->stack.used = position;
    return true;
}

typedef bool (*Filler)(Machine *, uint64_t);

static bool fill_last(Machine *m, uint64_t count, Filler fill) {
    return needs(m, count + 1) && fill(m, m->stack.used - count);
}

static bool fill_from_mark(Machine *m, Filler fill) {
    uint64_t position;
    if (!pop_mark(m, &position))
        return false;
    return position > fence(m) ? fill(m, position) : fail(m, "stack");
}

/* Makes a container of the stack from a position on: pushes an empty one, then puts it below. */
static bool make_from(Machine *m, uint64_t position, bool (*push_empty)(Machine *), Filler fill) {
    uint64_t count = m->stack.used - position;
    if (!push_empty(m))
        return false;
    Value made = *stack_at(m, position + count);
    memmove(stack_at(m, position + 1), stack_at(m, position), count * sizeof(Value));
    *stack_at(m, position) = made;
    return fill(m, position + 1);
}

static bool make_from_mark(Machine *m, bool (*push_empty)(Machine *), Filler fill) {
    uint64_t position;
    return pop_mark(m, &position) && make_from(m, position, push_empty, fill);
}

static bool make_tuple(Machine *m, uint64_t count) {
    return needs(m, count) && make_from(m, m->stack.used - count, push_list, append_from);
}

/* What stands around the values. */

static bool check_protocol(Machine *m) {
    uint64_t version;
    return take_number(m, 1, &version) && (version <= HIGHEST_PROTOCOL || fail(m, "protocol"));
}

/* A frame that is longer than the file shows a cut file at once. */
static bool check_frame(Machine *m) {
    uint64_t size;
    return take_number(m, 8, &size) && (size <= m->size - m->at || fail(m, "cut"));
}

static bool step(Machine *m, uint8_t opcode) {
    uint64_t n = 0;
    switch (opcode) {
    case OP_BINGET: return take_number(m, 1, &n) && memo_get(m, n) && memo_get_run(m);
    case OP_LONG_BINGET: return take_number(m, 4, &n) && memo_get(m, n) && memo_get_run(m);
    case OP_GET: return take_index_line(m, &n) && memo_get(m, n);
    case OP_MEMOIZE: return memo_put(m, m->memoized);
    case OP_BINPUT: return take_number(m, 1, &n) && memo_put(m, n);
    case OP_LONG_BINPUT: return take_number(m, 4, &n) && memo_put(m, n);
    case OP_PUT: return take_index_line(m, &n) && memo_put(m, n);
    case OP_BININT1: return take_number(m, 1, &n) && push_small(m, (int64_t)n);
    case OP_BININT2: return take_number(m, 2, &n) && push_small(m, (int64_t)n);
    case OP_BININT: return take_number(m, 4, &n) && push_small(m, (int32_t)(uint32_t)n);
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
    case OP_UNICODE: return push_line(m);
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
    case OP_MARK: return append(&m->marks, m->stack.used) || out_of_memory(m);
    case OP_POP: return pop(m);
    case OP_POP_MARK: return pop_mark(m, &m->stack.used);
    case OP_DUP: return needs(m, 1) && push(m, *stack_at(m, m->stack.used - 1));
    case OP_PROTO: return check_protocol(m);
    case OP_FRAME: return check_frame(m);
    default: return fail(m, "opcode");
    }
}

static bool run(Machine *m) {
    for (;;) {
        m->opcode_at = m->at;
        if (!take(m, 1))
            return false;
        uint8_t opcode = m->data[m->opcode_at];
        if (opcode == OP_STOP)
            break;
        if (!step(m, opcode))
            return false;
    }
    if (!needs(m, 1))
        return false;
    m->tree->root = *stack_at(m, m->stack.used - 1);
    return true;
}

/* ---- answers by the column (nothing of Python is touched here) ------------------------------- */

typedef struct {
    const Tree *tree;
    const Value *handles;
    uint64_t count;
    uint32_t key;         /* a blob, for look_up */
    void *first, *second; /* what is filled: an item a handle where nothing else is said */
    uint64_t first_bytes;
    const char *why; /* once refused: a word, as from the machine, */
    Value node;      /* and the node that it is about */
} Query;

static bool refuse(Query *query, const char *why, Value node) {
    query->why = why;
    query->node = node;
    return false;
}

/* Handles come back from Python, so that none of them is trusted. */
static inline bool exists(const Tree *tree, Value handle) {
    switch (TAG(handle)) {
    case ABSENT: return !handle;
    case CONSTANT: return PAYLOAD(handle) <= IS_TRUE;
    case SMALL: return true;
    case NUMBER:
    case FLOAT:
    case TEXT:
    case BYTES: return PAYLOAD(handle) < tree->blobs.used;
    case LIST: return PAYLOAD(handle) < tree->lists.used;
    case DICT: return PAYLOAD(handle) < tree->dicts.used;
    default: return false;
    }
}

static inline bool expect(Query *query, Value handle, int tag) {
    if (!exists(query->tree, handle))
        return refuse(query, "handle", handle);
    return TAG(handle) == tag || refuse(query, "kind", handle);
}

static bool read_lengths(Query *query) {
    int64_t *lengths = query->first;
    for (uint64_t i = 0; i < query->count; i++) {
        Value handle = query->handles[i];
        if (handle && !expect(query, handle, LIST))
            return false;
        lengths[i] = handle ? list_at(query->tree, handle)->length : 0;
    }
    return true;
}

/* Fills as much of the first array as there are items. */
static bool gather_items(Query *query) {
    Value *out = query->first;
    uint64_t room = query->first_bytes / sizeof(Value);
    for (uint64_t i = 0; i < query->count; i++) {
        Value handle = query->handles[i];
        if (handle && !expect(query, handle, LIST))
            return false;
        List list = handle ? *list_at(query->tree, handle) : (List){0};
        if (list.length > room)
            return refuse(query, "room", handle);
        if (list.length)
            memcpy(out, list.items, list.length * sizeof(Value));
        out += list.length;
        room -= list.length;
    }
    return true;
}

/* Returns the slot of a key's last value in a shape, plus 1; 0 where there is none. */
static uint32_t slot_of(const Tree *tree, uint32_t shape, uint32_t key) {
    for (; shape; shape = shape_at(tree, shape)->parent)
        if (shape_at(tree, shape)->key == key)
            return shape_at(tree, shape)->length;
    return 0;
}

/* Walks each shape once, however many dictionaries have it. The file holds a pair for each step of
 * the shape of a dictionary, so that all walks together are linear in the file. */
static bool look_up(Query *query) {
    const Tree *tree = query->tree;
    Value *found = query->first;
    uint32_t *slots = PyMem_RawCalloc(tree->shapes.used, sizeof(uint32_t)); /* + 1: 0 is unknown */
    uint64_t i = 0;
    if (!slots)
        return refuse(query, "memory", 0);
    for (; i < query->count && expect(query, query->handles[i], DICT); i++) {
        Dict dict = *dict_at(tree, query->handles[i]);
        if (!slots[dict.shape])
            slots[dict.shape] = slot_of(tree, dict.shape, query->key) + 1;
        uint32_t slot = slots[dict.shape] - 1;
        found[i] = slot ? dict.values[slot - 1] : 0;
    }
    PyMem_RawFree(slots);
    return i == query->count;
}

static bool read_integer(const Tree *tree, Value handle, int64_t *number) {
    Span span = TAG(handle) == NUMBER ? blob_at(tree, handle) : (Span){0};
    /* Nine bytes, the last of them zero, are what 2**63 to 2**64-1 take. */
    if (span.size == 9 && bytes_of(tree, span)[8] == 0)
        span.size = 8;
    *number = 0;
    if (TAG(handle) == SMALL)
        *number = small_number(handle);
    else if (TAG(handle) == CONSTANT)
        *number = PAYLOAD(handle) == IS_TRUE;
    else if (span.size <= 8)
        *number = signed_number(bytes_of(tree, span), span.size);
    return TAG(handle) == SMALL || (TAG(handle) == CONSTANT && PAYLOAD(handle) != IS_NONE)
        || (TAG(handle) == NUMBER && span.size <= 8);
}

/* Fills the numbers, and which handles are of such. */
static bool read_integers(Query *query) {
    int64_t *numbers = query->first;
    uint8_t *known = query->second;
    for (uint64_t i = 0; i < query->count; i++) {
        if (!exists(query->tree, query->handles[i]))
            return refuse(query, "handle", query->handles[i]);
        known[i] = read_integer(query->tree, query->handles[i], &numbers[i]);
    }
    return true;
}

/* ---- numbering by content -------------------------------------------------------------------- */

/* Frames are dictionaries in a list: two levels. What is nested deeper than this is compared by
 * identity, as in tree.py. */
#define INTERN_DEPTH 4

/* A key (upper half) and its slot (lower half): sorted, the slots of a key stand together, the last
 * one last. */
typedef uint64_t KeySlot;

typedef struct {
    uint64_t start, length;
} Stretch;

typedef struct {
    const Tree *tree;
    /* Of lists and of dictionaries, by depth: the content's number + 1, 0 where not visited. */
    uint32_t *numbers[2][INTERN_DEPTH];
    Stretch *shapes;  /* of key_slots, by shape */
    Vector key_slots; /* KeySlot: of the shapes met so far */
    Vector draft;     /* Value: a stack of contents under construction */
    Vector parts;     /* Value: of all contents */
    Vector contents;  /* Stretch, of parts */
    Table table;      /* of contents */
} Interner;

static void close_interner(Interner *in) {
    for (int depth = 0; depth < INTERN_DEPTH; depth++) {
        PyMem_RawFree(in->numbers[0][depth]);
        PyMem_RawFree(in->numbers[1][depth]);
    }
    PyMem_RawFree(in->shapes);
    PyMem_RawFree(in->key_slots.data);
    PyMem_RawFree(in->draft.data);
    PyMem_RawFree(in->parts.data);
    PyMem_RawFree(in->contents.data);
    PyMem_RawFree(in->table.slots);
}

static int compare_key_slots(const void *a, const void *b) {
    KeySlot left = *(const KeySlot *)a, right = *(const KeySlot *)b;
    return (left > right) - (left < right);
}

/* Appends the keys of a shape in the order of their numbers, each once, with its last slot. */
static bool add_key_slots(Interner *in, uint32_t shape) {
    uint32_t length = shape_at(in->tree, shape)->length;
    if (!length || !reserve(&in->key_slots, length, sizeof(KeySlot)))
        return !length;
    KeySlot *found = ITEMS(KeySlot, in->key_slots) + in->key_slots.used, *kept = found;
    for (const Shape *at; (at = shape_at(in->tree, shape))->length; shape = at->parent)
        found[at->length - 1] = (uint64_t)at->key << 32 | (at->length - 1);
    qsort(found, length, sizeof(KeySlot), compare_key_slots);
    for (uint32_t i = 1; i < length; i++) {
        kept += found[i] >> 32 != *kept >> 32;
        *kept = found[i];
    }
    in->key_slots.used += (uint64_t)(kept - found) + 1;
    return true;
}

/* Returns the number of the content that was drafted from a position on; NOTHING without memory. */
static uint32_t number_of_draft(Interner *in, uint64_t from) {
    const Value *draft = ITEMS(Value, in->draft) + from;
    uint64_t length = in->draft.used - from, size = length * sizeof(Value);
    uint32_t hash = hash_bytes(in->tree->hash_key, draft, size);
    uint64_t position = hash;
    for (uint32_t i; (i = table_next(&in->table, hash, &position)) != NOTHING;) {
        Stretch known = ITEMS(Stretch, in->contents)[i];
        if (known.length == length && !memcmp(ITEMS(Value, in->parts) + known.start, draft, size))
            return i;
    }
    if (!reserve(&in->contents, 1, sizeof(Stretch)) || !reserve(&in->parts, length, sizeof(Value))
        || !table_add(&in->table, hash, in->contents.used))
        return NOTHING;
    memcpy(ITEMS(Value, in->parts) + in->parts.used, draft, size);
    ITEMS(Stretch, in->contents)[in->contents.used] = (Stretch){in->parts.used, length};
    in->parts.used += length;
    return (uint32_t)in->contents.used++;
}

static Value new_content(Interner *in, Value node, int depth);

/* Returns a Value that nodes of equal content share; 0 without memory. */
static inline Value content_of(Interner *in, Value node, int depth) {
    if (TAG(node) < LIST || depth == INTERN_DEPTH)
        return node;
    const uint32_t *numbers = in->numbers[TAG(node) == DICT][depth];
    uint32_t number = numbers ? numbers[PAYLOAD(node)] : 0;
    return number ? MAKE(CONTENT, number - 1) : new_content(in, node, depth);
}

static inline bool draft_part(Interner *in, Value node, int depth) {
    Value part = content_of(in, node, depth);
    return part && append(&in->draft, part);
}

static bool draft_list(Interner *in, const List *list, int depth) {
    for (uint32_t i = 0; i < list->length; i++)
        if (!draft_part(in, list->items[i], depth))
            return false;
    return true;
}

static bool draft_dict(Interner *in, const Dict *dict, int depth) {
    Stretch *keys = &in->shapes[dict->shape];
    if (!keys->length) {
        keys->start = in->key_slots.used;
        if (!add_key_slots(in, dict->shape))
            return false;
        keys->length = in->key_slots.used - keys->start;
    }
    for (uint64_t i = 0; i < keys->length; i++) {
        KeySlot pair = ITEMS(KeySlot, in->key_slots)[keys->start + i];
        if (!append(&in->draft, pair >> 32) || !draft_part(in, dict->values[(uint32_t)pair], depth))
            return false;
    }
    return true;
}

/* Visits a container, once a depth: what contains itself comes to an end. */
static Value new_content(Interner *in, Value node, int depth) {
    bool is_dict = TAG(node) == DICT;
    uint32_t **numbers = &in->numbers[is_dict][depth];
    const Vector *all = is_dict ? &in->tree->dicts : &in->tree->lists;
    if (!*numbers)
        *numbers = PyMem_RawCalloc(all->used, sizeof **numbers);
    uint64_t from = in->draft.used;
    if (!*numbers || !append(&in->draft, is_dict))
        return 0;
    bool drafted = is_dict ? draft_dict(in, dict_at(in->tree, node), depth + 1)
                           : draft_list(in, list_at(in->tree, node), depth + 1);
    uint32_t number = drafted ? number_of_draft(in, from) : NOTHING;
    if (number == NOTHING)
        return 0;
    in->draft.used = from;
    (*numbers)[PAYLOAD(node)] = number + 1;
    return MAKE(CONTENT, number);
}

/* Returns the place of a content among those known, where it is put if it is new. */
static uint32_t id_of(Table *table, Vector *known, const uint64_t hash_key[2], Value content) {
    uint32_t hash = hash_bytes(hash_key, &content, sizeof content);
    uint64_t position = hash;
    for (uint32_t i; (i = table_next(table, hash, &position)) != NOTHING;)
        if (ITEMS(Value, *known)[i] == content)
            return i;
    bool added = known->used <= INT32_MAX && table_add(table, hash, known->used);
    return added && append(known, content) ? (uint32_t)known->used - 1 : NOTHING;
}

/* Fills the ids, and of each id the first node. */
static bool number_nodes(Query *query, Interner *in, Table *table, Vector *known) {
    uint32_t *ids = query->first;
    Value *nodes = query->second;
    for (uint64_t i = 0; i < query->count; i++) {
        Value handle = query->handles[i];
        if (i && handle == query->handles[i - 1]) {
            ids[i] = ids[i - 1];
            continue;
        }
        if (!exists(query->tree, handle))
            return refuse(query, "handle", handle);
        Value content = content_of(in, handle, 0);
        uint64_t before = known->used;
        ids[i] = content || !handle ? id_of(table, known, in->tree->hash_key, content) : NOTHING;
        if (ids[i] == NOTHING)
            return refuse(query, "memory", 0);
        if (known->used > before)
            nodes[ids[i]] = handle;
    }
    return true;
}

static bool intern_nodes(Query *query) {
    Interner in = {.tree = query->tree};
    Table table = {0};
    Vector known = {0}; /* Value: contents, by id */
    in.shapes = PyMem_RawCalloc(query->tree->shapes.used, sizeof(Stretch));
    bool good = in.shapes ? number_nodes(query, &in, &table, &known) : refuse(query, "memory", 0);
    close_interner(&in);
    PyMem_RawFree(table.slots);
    PyMem_RawFree(known.data);
    return good;
}

/* ---- Python objects -------------------------------------------------------------------------- */

static PyObject *new_text(const Tree *tree, Value blob) {
    Span span = blob_at(tree, blob);
    return PyUnicode_DecodeUTF8((const char *)bytes_of(tree, span), (Py_ssize_t)span.size, NULL);
}

static PyObject *new_large_integer(const Tree *tree, Span span) {
    Py_ssize_t size = (Py_ssize_t)span.size;
    PyObject *convert = PyObject_GetAttrString((PyObject *)&PyLong_Type, "from_bytes");
    PyObject *args = Py_BuildValue("(y#s)", bytes_of(tree, span), size, "little");
    PyObject *named = Py_BuildValue("{sO}", "signed", Py_True);
    PyObject *made = convert && args && named ? PyObject_Call(convert, args, named) : NULL;
    Py_XDECREF(convert);
    Py_XDECREF(args);
    Py_XDECREF(named);
    return made;
}

/* Makes the object of a scalar; None of what is none. */
static PyObject *new_scalar(const Tree *tree, Value node) {
    bool is_blob = TAG(node) >= NUMBER && TAG(node) <= BYTES;
    Span span = is_blob ? blob_at(tree, node) : (Span){0};
    const char *bytes = is_blob ? (const char *)bytes_of(tree, span) : NULL;
    switch (TAG(node)) {
    case CONSTANT:
        if (PAYLOAD(node) == IS_NONE)
            Py_RETURN_NONE;
        return PyBool_FromLong(PAYLOAD(node) == IS_TRUE);
    case SMALL: return PyLong_FromLongLong(small_number(node));
    case NUMBER: return new_large_integer(tree, span);
    case FLOAT: return PyFloat_FromDouble(span.size == 8 ? PyFloat_Unpack8(bytes, 0) : 0);
    case TEXT: return new_text(tree, node);
    case BYTES: return PyBytes_FromStringAndSize(bytes, (Py_ssize_t)span.size);
    default: return Py_NewRef(Py_None);
    }
}

/* Maps the keys of a dictionary, in the order of the file, to the handles of their values. */
static PyObject *new_members(const Tree *tree, const Dict *dict) {
    uint32_t length = shape_at(tree, dict->shape)->length;
    uint32_t *keys = PyMem_Calloc(length + (size_t)1, sizeof(uint32_t));
    PyObject *made = keys ? PyDict_New() : PyErr_NoMemory();
    for (uint32_t shape = dict->shape; keys && shape; shape = shape_at(tree, shape)->parent)
        keys[shape_at(tree, shape)->length - 1] = shape_at(tree, shape)->key;
    for (uint32_t i = 0; made && i < length; i++) {
        PyObject *key = new_text(tree, keys[i]);
        PyObject *handle = PyLong_FromUnsignedLongLong(dict->values[i]);
        if (!key || !handle || PyDict_SetItem(made, key, handle) < 0)
            Py_CLEAR(made);
        Py_XDECREF(key);
        Py_XDECREF(handle);
    }
    PyMem_Free(keys);
    return made;
}

/* ---- the Python type ------------------------------------------------------------------------- */

static const char *kind_name(Value node) {
    static const char *const names[] = {
        "NoneType", "bool", "int", "int", "float", "text", "bytes", "a list", "a dictionary",
    };
    return node == MAKE(CONSTANT, IS_NONE) ? "NoneType" : names[TAG(node)];
}

static PyObject *raise_words(PyObject *words) {
    if (words)
        PyErr_SetObject(PyExc_ValueError, words);
    Py_XDECREF(words);
    return NULL;
}

static PyObject *raise_refusal(const Query *query) {
    if (!strcmp(query->why, "memory"))
        return PyErr_NoMemory();
    if (!strcmp(query->why, "kind"))
        return raise_words(Py_BuildValue("(ss)", query->why, kind_name(query->node)));
    return PyErr_Format(PyExc_IndexError, "%s: %llu", query->why, (unsigned long long)query->node);
}

static bool take_handle(const Tree *tree, PyObject *argument, Value *handle) {
    PyObject *index = PyNumber_Index(argument);
    *handle = index ? PyLong_AsUnsignedLongLong(index) : 0;
    Py_XDECREF(index);
    if (!PyErr_Occurred() && !exists(tree, *handle))
        PyErr_Format(PyExc_IndexError, "handle: %llu", (unsigned long long)*handle);
    return !PyErr_Occurred();
}

static PyObject *tree_kind(PyObject *self, PyObject *argument) {
    Value handle;
    bool good = take_handle((Tree *)self, argument, &handle);
    return good ? PyUnicode_FromString(kind_name(handle)) : NULL;
}

static PyObject *tree_scalar(PyObject *self, PyObject *argument) {
    Value handle;
    bool good = take_handle((Tree *)self, argument, &handle);
    return good ? new_scalar((Tree *)self, handle) : NULL;
}

static PyObject *tree_members(PyObject *self, PyObject *argument) {
    Query query = {.tree = (Tree *)self};
    Value handle;
    if (!take_handle(query.tree, argument, &handle))
        return NULL;
    return expect(&query, handle, DICT) ? new_members(query.tree, dict_at(query.tree, handle))
                                        : raise_refusal(&query);
}

/* The arguments of a query: handles, and one or two arrays to be filled. */
typedef struct {
    Py_buffer handles, first, second;
} Arrays;

static bool has_room(const Py_buffer *array, uint64_t count, uint64_t item_bytes) {
    bool aligned = !array->len || (uintptr_t)array->buf % item_bytes == 0;
    if (!aligned || (uint64_t)array->len / item_bytes < count)
        PyErr_SetString(PyExc_TypeError, "an array is too short or not aligned");
    return !PyErr_Occurred();
}

static void release(Py_buffer *array) {
    if (array->obj)
        PyBuffer_Release(array);
}

/* Answers a query. The numbers are the bytes that an array needs for each handle; 0 is any size. */
static PyObject *answer(Query *query, Arrays *arrays, bool (*fill)(Query *), unsigned first_bytes,
                        unsigned second_bytes) {
    query->handles = arrays->handles.buf;
    query->count = (uint64_t)arrays->handles.len / sizeof(Value);
    query->first = arrays->first.buf;
    query->first_bytes = (uint64_t)arrays->first.len;
    query->second = arrays->second.buf;
    bool good = has_room(&arrays->handles, query->count, sizeof(Value))
        && (!first_bytes || has_room(&arrays->first, query->count, first_bytes))
        && (!second_bytes || has_room(&arrays->second, query->count, second_bytes));
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        good = fill(query);
        Py_END_ALLOW_THREADS
        if (!good)
            raise_refusal(query);
    }
    release(&arrays->handles);
    release(&arrays->first);
    release(&arrays->second);
    return good ? Py_NewRef(Py_None) : NULL;
}

static PyObject *tree_lengths(PyObject *self, PyObject *args) {
    Query query = {.tree = (Tree *)self};
    Arrays arrays = {0};
    if (!PyArg_ParseTuple(args, "y*w*:lengths", &arrays.handles, &arrays.first))
        return NULL;
    return answer(&query, &arrays, read_lengths, sizeof(int64_t), 0);
}

static PyObject *tree_gather(PyObject *self, PyObject *args) {
    Query query = {.tree = (Tree *)self};
    Arrays arrays = {0};
    if (!PyArg_ParseTuple(args, "y*w*:gather", &arrays.handles, &arrays.first))
        return NULL;
    return answer(&query, &arrays, gather_items, 0, 0);
}

/* Returns the number of a key; NOTHING, which no shape has, where the file has no such text. */
static uint32_t key_number(const Tree *tree, PyObject *key) {
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(key, &size);
    if (!text) {
        PyErr_Clear(); /* a lone surrogate, which no text of a file has */
        return NOTHING;
    }
    uint32_t hash = hash_bytes(tree->hash_key, text, (uint64_t)size);
    return find_blob(tree, text, (uint64_t)size, hash);
}

static PyObject *tree_column(PyObject *self, PyObject *args) {
    Query query = {.tree = (Tree *)self};
    Arrays arrays = {0};
    PyObject *key;
    if (!PyArg_ParseTuple(args, "y*w*U:column", &arrays.handles, &arrays.first, &key))
        return NULL;
    query.key = key_number(query.tree, key);
    return answer(&query, &arrays, look_up, sizeof(Value), 0);
}

static PyObject *tree_integers(PyObject *self, PyObject *args) {
    Query query = {.tree = (Tree *)self};
    Arrays arrays = {0};
    if (!PyArg_ParseTuple(args, "y*w*w*:integers", &arrays.handles, &arrays.first, &arrays.second))
        return NULL;
    return answer(&query, &arrays, read_integers, sizeof(int64_t), 1);
}

static PyObject *tree_intern(PyObject *self, PyObject *args) {
    Query query = {.tree = (Tree *)self};
    Arrays arrays = {0};
    if (!PyArg_ParseTuple(args, "y*w*w*:intern", &arrays.handles, &arrays.first, &arrays.second))
        return NULL;
    return answer(&query, &arrays, intern_nodes, sizeof(int32_t), sizeof(Value));
}

static PyObject *tree_root(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(((Tree *)self)->root);
}

static void tree_dealloc(PyObject *self) {
    Tree *tree = (Tree *)self;
    PyTypeObject *type = Py_TYPE(self);
    for (Chunk *chunk = tree->chunks, *next; chunk; chunk = next) {
        next = chunk->next;
        PyMem_RawFree(chunk);
    }
    PyMem_RawFree(tree->blobs.data);
    PyMem_RawFree(tree->spill.data);
    PyMem_RawFree(tree->lists.data);
    PyMem_RawFree(tree->dicts.data);
    PyMem_RawFree(tree->shapes.data);
    PyMem_RawFree(tree->blob_table.slots);
    PyMem_RawFree(tree->shape_table.slots);
    release(&tree->file);
    type->tp_free(self);
    Py_DECREF(type);
}

static bool read_file(Tree *tree, PyObject *convert) {
    Machine m = {
        .tree = tree, .data = tree->file.buf, .size = (uint64_t)tree->file.len, .convert = convert,
    };
    leave_python(&m);
    bool good = reserve(&tree->shapes, 1, sizeof(Shape)) || out_of_memory(&m);
    if (good) {
        *shape_at(tree, (uint32_t)tree->shapes.used++) = (Shape){0};
        good = run(&m);
    }
    PyMem_RawFree(m.stack.data);
    PyMem_RawFree(m.marks.data);
    PyMem_RawFree(m.memo.data);
    enter_python(&m);
    if (!good && !strcmp(m.failure, "memory"))
        PyErr_NoMemory();
    else if (!good && strcmp(m.failure, "raised"))
        raise_words(Py_BuildValue("(sK)", m.failure, (unsigned long long)m.opcode_at));
    return good;
}

static PyObject *tree_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    static char *names[] = {"buffer", "seed", "convert", NULL};
    PyObject *buffer, *convert;
    const char *seed;
    Py_ssize_t seed_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, named, "Oy#O:PickledTree", names, &buffer, &seed,
                                     &seed_bytes, &convert))
        return NULL;
    Tree *tree = (Tree *)type->tp_alloc(type, 0);
    if (!tree)
        return NULL;
    memcpy(tree->hash_key, seed, Py_MIN((size_t)seed_bytes, sizeof tree->hash_key));
    if (PyObject_GetBuffer(buffer, &tree->file, PyBUF_SIMPLE) == 0 && read_file(tree, convert))
        return (PyObject *)tree;
    Py_DECREF(tree);
    return NULL;
}

static PyMethodDef tree_methods[] = {
    {"kind", tree_kind, METH_O, "Name what a node is."},
    {"scalar", tree_scalar, METH_O, "Make the Python object of a node that is no container."},
    {"members", tree_members, METH_O, "Map the keys of a dictionary to handles."},
    {"lengths", tree_lengths, METH_VARARGS, "Count the items of lists."},
    {"gather", tree_gather, METH_VARARGS, "Concatenate the items of lists."},
    {"column", tree_column, METH_VARARGS, "Look one key up in many dictionaries."},
    {"integers", tree_integers, METH_VARARGS, "Read integers, and which nodes are such."},
    {"intern", tree_intern, METH_VARARGS, "Number nodes by content."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef tree_attributes[] = {
    {"root", tree_root, NULL, "The handle of the outermost object.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot tree_slots[] = {
    {Py_tp_doc, "The tree that a pickle of plain data describes."},
    {Py_tp_new, tree_new},
    {Py_tp_dealloc, tree_dealloc},
    {Py_tp_methods, tree_methods},
    {Py_tp_getset, tree_attributes},
    {0, NULL},
};

static PyType_Spec tree_spec = {
    .name = "cudakit.core.memory.load._pickled.PickledTree",
    .basicsize = sizeof(Tree),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = tree_slots,
};

static int add_type(PyObject *module) {
    PyObject *type = PyType_FromSpec(&tree_spec);
    int status = type ? PyModule_AddObjectRef(module, "PickledTree", type) : -1;
    Py_XDECREF(type);
    return status;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, add_type},
    {0, NULL},
};

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_pickled",
    .m_doc = "The native reader of pickles of plain data.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__pickled(void) { return PyModuleDef_Init(&module_definition); }
