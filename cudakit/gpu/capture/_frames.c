/* Reads the Python frames of the calling thread without the GIL.
 *
 * While a thread is inside a call into C, its frames do not change: only the thread itself pushes, pops and runs
 * them. Therefore it may read them without the GIL. Frames keep their code objects alive, and names, files
 * and location tables of code objects never change once they run.
 *
 * Frames are internal structs of the interpreter. Their layout differs between versions of CPython and is declared in
 * Include/internal/pycore_frame.h, from 3.14 on pycore_interpframe.h and its _structs.h.
 */

#define PY_SSIZE_T_CLEAN
#define Py_BUILD_CORE_MODULE 1 /* makes the internal headers available outside of CPython */
#include <Python.h>

#if PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030F0000
#error "this version of CPython is not supported: the layout of its frames is unknown"
#endif
#ifdef Py_GIL_DISABLED
#error "free-threaded CPython is not supported: the bytecode of a thread may move while it is read"
#endif

#if PY_VERSION_HEX >= 0x030E0000
#include <internal/pycore_interpframe.h>
#else
#include <internal/pycore_frame.h>
#endif

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "walker.h"

typedef struct _PyInterpreterFrame Frame;

/* --- differences between versions ------------------------------------------------------------- */

static inline Frame *current_frame(const PyThreadState *thread)
{
#if PY_VERSION_HEX >= 0x030D0000
    return thread->current_frame;
#else
    return thread->cframe->current_frame;
#endif
}

static inline PyCodeObject *frame_code(const Frame *frame)
{
#if PY_VERSION_HEX >= 0x030E0000
    PyObject *executable = PyStackRef_AsPyObjectBorrow(frame->f_executable);
#elif PY_VERSION_HEX >= 0x030D0000
    PyObject *executable = frame->f_executable;
#else
    PyObject *executable = (PyObject *)frame->f_code;
#endif
    return executable && PyCode_Check(executable) ? (PyCodeObject *)executable : NULL;
}

static inline const _Py_CODEUNIT *frame_instruction(const Frame *frame)
{
#if PY_VERSION_HEX >= 0x030D0000
    return frame->instr_ptr;
#else
    return frame->prev_instr;
#endif
}

/* Return whether a frame only links the C stack to the Python stack, and runs no Python code. */
static inline bool is_trampoline(const Frame *frame)
{
#if PY_VERSION_HEX >= 0x030E0000
    return frame->owner >= FRAME_OWNED_BY_INTERPRETER;
#elif PY_VERSION_HEX >= 0x030C0000
    return frame->owner == FRAME_OWNED_BY_CSTACK;
#else
    (void)frame;
    return false;
#endif
}

static inline bool is_finalizing(void)
{
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

/* --- stack walk --------------------------------------------------------------------------------- */

/* Return whether a frame has executed its prologue, which creates cells or a generator. CPython's
 * _PyFrame_IsIncomplete has the same rule. */
static inline bool is_complete(const Frame *frame)
{
    if (is_trampoline(frame))
        return false;
    PyCodeObject *code = frame_code(frame);
    if (!code)
        return false;
    return frame->owner == FRAME_OWNED_BY_GENERATOR ||
           frame_instruction(frame) >= _PyCode_CODE(code) + code->_co_firsttraceable;
}

/* Return the first complete frame among this frame and its callers, or NULL. */
static inline const Frame *nearest_complete_frame(const Frame *frame)
{
    while (frame && !is_complete(frame))
        frame = frame->previous;
    return frame;
}

static inline uint64_t instruction_offset(const Frame *frame, PyCodeObject *code)
{
    // NOLINTNEXTLINE(clang-analyzer-core.NullPointerArithm): a complete frame has a code object
    return (uint64_t)((const char *)frame_instruction(frame) - (const char *)_PyCode_CODE(code));
}

static inline uint64_t address_of(const void *object)
{
    return (uint64_t)(uintptr_t)object;
}

/* Return a number that distinguishes a code object from a freed one: both, and their parts, may have the
 * same addresses. CPython 3.12 and newer number their code objects. For 3.11, the number is computed from names and
 * lines. */
static inline uint64_t code_version(PyCodeObject *code)
{
#if PY_VERSION_HEX >= 0x030C0000
    return code->co_version; /* increases with each new code object */
#else
    /* Names of generated files usually end in a number: <ipython-input-7>, kernel_7.py. */
    uint64_t name_tail = 0, table_head = 0;
    size_t length = (size_t)PyUnicode_GET_LENGTH(code->co_filename);
    size_t tail_bytes = length < sizeof name_tail ? length : sizeof name_tail;
    if (PyUnicode_IS_COMPACT_ASCII(code->co_filename))
        memcpy(&name_tail, (const char *)PyUnicode_DATA(code->co_filename) + length - tail_bytes, tail_bytes);
    size_t table_bytes = (size_t)PyBytes_GET_SIZE(code->co_linetable);
    memcpy(&table_head, PyBytes_AS_STRING(code->co_linetable),
           table_bytes < sizeof table_head ? table_bytes : sizeof table_head);
    return (address_of(code->co_filename) ^ name_tail) * 0xff51afd7ed558ccdu + table_head + table_bytes;
#endif
}

/* Return the key of a frame. The multipliers are odd numbers without a bit pattern, so that different frames are
 * unlikely to have the same key. */
static inline uint64_t frame_key(PyCodeObject *code, uint64_t offset)
{
    uint64_t key = address_of(code) * 0x9e3779b97f4a7c15u + offset * 0xbf58476d1ce4e5b9u +
                   (uint64_t)code->co_firstlineno * 0x94d049bb133111ebu +
                   address_of(code->co_linetable) * 0xd6e8feb86659fd93u +
                   address_of(code->co_qualname) * 0xa0761d6478bd642fu + code_version(code) * 0xe7037ed1a0b428dbu;
    key = (key ^ (key >> 32)) * 0xd6e8feb86659fd93u;
    key ^= key >> 32;
    return key ? key : 1;
}

static int walk(uint64_t *keys, uint64_t *codes, uint64_t *offsets, int limit)
{
    PyThreadState *thread = PyGILState_GetThisThreadState();
    /* Python frees thread states when it finalizes, while threads may still run. */
    if (!thread || is_finalizing())
        return 0;
    int depth = 0;
    for (const Frame *frame = nearest_complete_frame(current_frame(thread)); frame && depth < limit;
         frame = nearest_complete_frame(frame->previous)) {
        PyCodeObject *code = frame_code(frame);
        uint64_t offset = instruction_offset(frame, code);
        keys[depth] = frame_key(code, offset);
        codes[depth] = address_of(code);
        offsets[depth] = offset;
        depth++;
    }
    return depth;
}

/* --- lines ------------------------------------------------------------------------------------ */

/* PyCode_Addr2Line cannot be used: it first reads a table that a tracing thread may be filling. These functions
 * only read the location table, whose format is described in Objects/locations.md (3.11: in
 * Objects/codeobject.c). */

enum {
    ENTRY_BEGIN = 0x80,
    VARINT_MORE = 0x40,
    FORM_LONG = 14,
    FORM_NO_COLUMNS = 13,
    FORM_ONE_LINE_0 = 10,
    FORM_NO_LOCATION = 15
};

static int32_t signed_varint(const uint8_t *bytes, const uint8_t *end)
{
    uint32_t value = 0;
    for (int shift = 0; bytes < end && shift < 32; shift += 6) {
        value |= (uint32_t)(*bytes & 0x3f) << shift;
        if (!(*bytes++ & VARINT_MORE))
            break;
    }
    int32_t magnitude = (int32_t)(value >> 1);
    return value & 1 ? -magnitude : magnitude;
}

static int32_t line_delta(const uint8_t *entry, const uint8_t *end)
{
    int entry_code = (*entry >> 3) & 15;
    if (entry_code == FORM_NO_COLUMNS || entry_code == FORM_LONG)
        return signed_varint(entry + 1, end);
    return entry_code >= FORM_ONE_LINE_0 && entry_code < FORM_NO_COLUMNS ? entry_code - FORM_ONE_LINE_0 : 0;
}

static int32_t line_at(PyCodeObject *code, uint64_t offset)
{
    const uint8_t *entry = (const uint8_t *)PyBytes_AS_STRING(code->co_linetable);
    const uint8_t *end = entry + PyBytes_GET_SIZE(code->co_linetable);
    int32_t line = code->co_firstlineno;
    uint64_t end_offset = 0;
    while (entry < end) {
        line += line_delta(entry, end);
        end_offset += ((*entry & 7) + 1) * sizeof(_Py_CODEUNIT);
        if (offset < end_offset)
            return ((*entry >> 3) & 15) == FORM_NO_LOCATION ? 0 : line;
        do
            entry++;
        while (entry < end && !(*entry & ENTRY_BEGIN));
    }
    return 0;
}

/* --- strings ---------------------------------------------------------------------------------- */

static const Py_UCS4 REPLACEMENT = 0xfffd;

static size_t encode_utf8(Py_UCS4 character, char *bytes)
{
    if (character < 0x80) {
        bytes[0] = (char)character;
        return 1;
    }
    size_t count = character < 0x800 ? 2 : character < 0x10000 ? 3 : 4;
    static const uint8_t lead_bits[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t index = count - 1; index; index--, character >>= 6)
        bytes[index] = (char)(0x80 | (character & 0x3f));
    bytes[0] = (char)(lead_bits[count] | character);
    return count;
}

static void copy_utf8(PyObject *text, char *out, size_t capacity)
{
    size_t length_bytes = 0;
    bool readable = text && PyUnicode_Check(text);
#if PY_VERSION_HEX < 0x030C0000
    readable = readable && PyUnicode_IS_READY(text);
#endif
    Py_ssize_t length = readable ? PyUnicode_GET_LENGTH(text) : 0;
    for (Py_ssize_t index = 0; index < length; index++) {
        Py_UCS4 character = PyUnicode_READ(PyUnicode_KIND(text), PyUnicode_DATA(text), index);
        char bytes[4];
        size_t count =
            encode_utf8(!character || Py_UNICODE_IS_SURROGATE(character) ? REPLACEMENT : character, bytes);
        if (length_bytes + count >= capacity)
            break;
        memcpy(out + length_bytes, bytes, count);
        length_bytes += count;
    }
    out[length_bytes] = 0;
}

static int resolve(uint64_t code, uint64_t offset, struct ck_frame *out)
{
    if (!code)
        return -1;
    PyCodeObject *object = (PyCodeObject *)(uintptr_t)code;
    copy_utf8(object->co_qualname, out->function, sizeof out->function);
    copy_utf8(object->co_filename, out->file, sizeof out->file);
    out->line = line_at(object, offset);
    return 0;
}

static const struct ck_walker WALKER = {walk, resolve};

/* --- module ----------------------------------------------------------------------------------- */

enum { STACK_LIMIT = 1024 };

static PyObject *frame_tuple(uint64_t code, uint64_t offset)
{
    struct ck_frame frame = {.line = 0};
    resolve(code, offset, &frame);
    return Py_BuildValue("(ssi)", frame.function, frame.file, (int)frame.line);
}

static PyObject *frame_list(const uint64_t *codes, const uint64_t *offsets, int depth)
{
    PyObject *list = PyList_New(depth);
    for (int index = 0; list && index < depth; index++) {
        PyObject *tuple = frame_tuple(codes[index], offsets[index]);
        if (tuple)
            PyList_SET_ITEM(list, index, tuple);
        else
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *stack(PyObject *module, PyObject *arguments, PyObject *keyword_arguments)
{
    (void)module;
    static char *keywords[] = {"limit", NULL};
    int limit = 64;
    if (!PyArg_ParseTupleAndKeywords(arguments, keyword_arguments, "|i", keywords, &limit))
        return NULL;
    uint64_t keys[STACK_LIMIT], codes[STACK_LIMIT], offsets[STACK_LIMIT];
    int depth = walk(keys, codes, offsets, limit < STACK_LIMIT ? limit : STACK_LIMIT);
    return frame_list(codes, offsets, depth);
}

/* Return whether the frames read here are those that the interpreter reports. They differ if a patch release of
 * CPython changed the layout. */
static bool matches_interpreter(PyThreadState *thread)
{
    const Frame *frame = nearest_complete_frame(current_frame(thread));
    PyFrameObject *reported = PyThreadState_GetFrame(thread);
    bool is_same = true;
    while (is_same && reported) {
        PyCodeObject *code = PyFrame_GetCode(reported);
        is_same = frame && frame_code(frame) == code &&
                  instruction_offset(frame, code) == (uint64_t)PyFrame_GetLasti(reported);
        Py_DECREF(code);
        PyFrameObject *caller = is_same ? PyFrame_GetBack(reported) : NULL;
        Py_SETREF(reported, caller);
        frame = is_same ? nearest_complete_frame(frame->previous) : frame;
    }
    Py_XDECREF(reported);
    return is_same;
}

static int initialize_module(PyObject *module)
{
    if (Py_Version >> 16 != PY_VERSION_HEX >> 16 || !matches_interpreter(PyThreadState_Get())) {
        PyErr_SetString(PyExc_ImportError, "built for another version of CPython than this one");
        return -1;
    }
    PyObject *walker = PyLong_FromVoidPtr((void *)&WALKER);
    int status = walker ? PyModule_AddObjectRef(module, "walker", walker) : -1;
    Py_XDECREF(walker);
    return status;
}

PyDoc_STRVAR(stack_doc, "stack(limit=64)\n--\n\n"
                        "Return (function, file, line) of the caller's frames, innermost first, as the\n"
                        "recorder reads them: at most 1,024. A line number of 0 is unknown.");

static PyMethodDef METHODS[] = {
    {"stack", (PyCFunction)(void (*)(void))stack, METH_VARARGS | METH_KEYWORDS, stack_doc},
    {0},
};

/* A build without the GIL is rejected above, so Py_mod_gil is not declared. */
static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, initialize_module},
#ifdef Py_mod_multiple_interpreters
    /* Subinterpreters are not supported: PyGILState_GetThisThreadState returns the state of the main interpreter. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cudakit.gpu.capture._frames",
    .m_doc = "Reads the Python frames of the calling thread without the GIL.",
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__frames(void)
{
    return PyModuleDef_Init(&MODULE);
}
