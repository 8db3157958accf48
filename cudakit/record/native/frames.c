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

#include <regex.h>
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
static inline bool is_complete_frame(const Frame *frame)
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
    while (frame && !is_complete_frame(frame))
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

/* Return a number that distinguishes a code object from a freed code object that had the same address. CPython 3.12 and
 * newer number their code objects. For 3.11, the number is computed from names and
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

static int walk_stack(uint64_t *keys, uint64_t *codes, uint64_t *offsets, int limit)
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

/* --- strings ---------------------------------------------------------------------------------- */

static const Py_UCS4 REPLACEMENT = 0xfffd;

static size_t encode_utf8(Py_UCS4 character, char *bytes)
{
    if (character < 0x80) {
        bytes[0] = (char)character;
        return 1;
    }
    size_t byte_count = character < 0x800 ? 2 : character < 0x10000 ? 3 : 4;
    static const uint8_t lead_bits[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t index = byte_count - 1; index; index--, character >>= 6)
        bytes[index] = (char)(0x80 | (character & 0x3f));
    bytes[0] = (char)(lead_bits[byte_count] | character);
    return byte_count;
}

static void copy_utf8(PyObject *text, char *out, size_t capacity)
{
    size_t length_bytes = 0;
    bool is_readable = text && PyUnicode_Check(text);
#if PY_VERSION_HEX < 0x030C0000
    is_readable = is_readable && PyUnicode_IS_READY(text);
#endif
    Py_ssize_t length = is_readable ? PyUnicode_GET_LENGTH(text) : 0;
    for (Py_ssize_t index = 0; index < length; index++) {
        Py_UCS4 character = PyUnicode_READ(PyUnicode_KIND(text), PyUnicode_DATA(text), index);
        char bytes[4];
        size_t byte_count =
            encode_utf8(!character || Py_UNICODE_IS_SURROGATE(character) ? REPLACEMENT : character, bytes);
        if (length_bytes + byte_count >= capacity)
            break;
        memcpy(out + length_bytes, bytes, byte_count);
        length_bytes += byte_count;
    }
    out[length_bytes] = 0;
}

/* --- files of the program ----------------------------------------------------------------------- */

/* The patterns of cudakit/stacks.py, compiled by watch_program_calls(). */
static regex_t library_files, typed_code;

static bool is_program_file(const char *path)
{
    return !regexec(&typed_code, path, 0, NULL, 0) || regexec(&library_files, path, 0, NULL, 0) == REG_NOMATCH;
}

/* The cache of is_program_file(), by the address of the name. Its names are never freed. Threads with the GIL add
 * entries; threads without it read them. */
#define FILE_SLOTS 16384
#define MAX_CACHED_FILES (FILE_SLOTS / 2)

static struct {
    PyObject *name;
    bool is_program;
} cached_files[FILE_SLOTS];
static int cached_file_count;

/* Return the slot of a file name, or the free slot for it. */
static size_t file_slot(PyObject *name)
{
    size_t slot = (size_t)(address_of(name) * 0x9e3779b97f4a7c15u >> 40) % FILE_SLOTS;
    for (PyObject *stored_name;
         (stored_name = __atomic_load_n(&cached_files[slot].name, __ATOMIC_ACQUIRE)) && stored_name != name;)
        slot = (slot + 1) % FILE_SLOTS;
    return slot;
}

static bool is_uncached_program_file(PyObject *name)
{
    char path[4096];
    copy_utf8(name, path, sizeof path);
    return is_program_file(path);
}

/* Return whether a code object belongs to the program. */
static bool is_program_code(PyCodeObject *code)
{
    const size_t slot = file_slot(code->co_filename);
    return __atomic_load_n(&cached_files[slot].name, __ATOMIC_ACQUIRE)
               ? cached_files[slot].is_program
               : is_uncached_program_file(code->co_filename);
}

#if PY_VERSION_HEX >= 0x030C0000
/* Return whether a code object belongs to the program, and cache the answer. The GIL is held. */
static bool cache_program_code(PyCodeObject *code)
{
    const size_t slot = file_slot(code->co_filename);
    if (!cached_files[slot].name && cached_file_count < MAX_CACHED_FILES) {
        cached_files[slot].is_program = is_uncached_program_file(code->co_filename);
        __atomic_store_n(&cached_files[slot].name, Py_NewRef(code->co_filename), __ATOMIC_RELEASE);
        cached_file_count++;
    }
    return is_program_code(code);
}
#endif

/* --- program calls ------------------------------------------------------------------------------ */

/* A program call is one execution of an instruction in the program's own code: a call of a library, an operator, and so
 * on. While the instruction is executed, its frame stays at this instruction. The frame can only reach the instruction
 * again by a jump backward, by being resumed, or as a new frame at the same address. The interpreter reports these three
 * events (PEP 669), from Python 3.12 on. So two CUDA calls belong to one program call exactly if their innermost frame
 * of the program has the same address and instruction, without such an event in between.
 *
 * One instruction can call a function of a library several times, through C: list(map(function, streams)). Each of
 * these calls counts as a program call. They are distinguished by their arguments. */

enum { FRAME_SLOTS = 256, FRAME_PROBES = 8 };

typedef struct {
    const Frame *frame;
    uint64_t offset; /* offset of the instruction to which ``program_call`` refers */
    uint64_t
        arguments_hash; /* hash of the arguments of a function written in C that the instruction calls; else 0 */
    uint32_t
        program_call; /* number of the program call; 0 if the frame has run on since the number was assigned */
} program_frame;

/* The frames of the program on this thread. The program call of a frame is unknown if another frame has taken its
 * entry. */
static __thread program_frame program_frames[FRAME_SLOTS];

/* Number of the last program call of the process. */
static uint32_t last_program_call;

static bool program_calls_are_watched;

static inline size_t frame_slot(const Frame *frame, int probe)
{
    return ((size_t)(address_of(frame) * 0x9e3779b97f4a7c15u >> 48) + (size_t)probe) % FRAME_SLOTS;
}

static program_frame *find_program_frame(const Frame *frame)
{
    for (int probe = 0; probe < FRAME_PROBES; probe++) {
        program_frame *slot_entry = &program_frames[frame_slot(frame, probe)];
        if (slot_entry->frame == frame)
            return slot_entry;
    }
    return NULL;
}

#if PY_VERSION_HEX >= 0x030C0000
/* Number of displaced frames of this thread, which selects the next frame to displace. */
static __thread unsigned displaced_frames;

/* Return whether the calling thread runs a frame, or a frame that this frame has called. */
static bool is_running_frame(const Frame *frame)
{
    const Frame *running_frame = current_frame(PyThreadState_Get());
    while (running_frame && running_frame != frame)
        running_frame = running_frame->previous;
    return running_frame != NULL;
}

/* Begin a new program call of a frame that has started, was resumed or has jumped backward. If there is no free
 * entry, the frame takes the entry of a frame that is not running: the other frame has ended, or begins a new
 * program call when it is resumed. */
static void begin_program_call(const Frame *frame)
{
    program_frame *program_entry = find_program_frame(frame);
    for (int probe = 0; !program_entry && probe < FRAME_PROBES; probe++) {
        program_frame *candidate_entry = &program_frames[frame_slot(frame, probe)];
        program_entry = candidate_entry->frame ? NULL : candidate_entry;
    }
    for (int probe = 0; !program_entry && probe < FRAME_PROBES; probe++) {
        program_frame *candidate_entry = &program_frames[frame_slot(frame, probe)];
        program_entry = is_running_frame(candidate_entry->frame) ? NULL : candidate_entry;
    }
    if (!program_entry)
        program_entry = &program_frames[frame_slot(frame, (int)(displaced_frames++ % FRAME_PROBES))];
    *program_entry = (program_frame){.frame = frame};
}
#endif

/* Return a hash of the addresses of a frame's arguments. */
static uint64_t argument_hash(const Frame *frame)
{
    const PyCodeObject *code = frame_code(frame);
    const int argument_count = code->co_argcount + code->co_kwonlyargcount + !!(code->co_flags & CO_VARARGS) +
                               !!(code->co_flags & CO_VARKEYWORDS);
    uint64_t hash = address_of(code);
    for (int index = 0; index < argument_count; index++) {
        uintptr_t argument;
        memcpy(&argument, &frame->localsplus[index], sizeof argument);
        hash = (hash ^ argument) * 0x9e3779b97f4a7c15u + (hash >> 29);
    }
    return hash;
}

static uint32_t program_call(void)
{
    PyThreadState *thread = PyGILState_GetThisThreadState();
    if (!program_calls_are_watched || !thread || is_finalizing())
        return 0;
    const Frame *frame = nearest_complete_frame(current_frame(thread)), *library_frame = NULL;
    while (frame && !is_program_code(frame_code(frame))) {
        library_frame = frame;
        frame = nearest_complete_frame(frame->previous);
    }
    program_frame *program_entry = frame ? find_program_frame(frame) : NULL;
    if (!program_entry)
        return 0;
    const uint64_t offset = instruction_offset(frame, frame_code(frame));
    const bool is_called_by_c = library_frame && library_frame->previous != frame;
    const uint64_t arguments_hash = is_called_by_c ? argument_hash(library_frame) : 0;
    if (!program_entry->program_call || program_entry->offset != offset ||
        program_entry->arguments_hash != arguments_hash) {
        program_entry->offset = offset;
        program_entry->arguments_hash = arguments_hash;
        do
            program_entry->program_call = __atomic_add_fetch(&last_program_call, 1, __ATOMIC_RELAXED);
        while (!program_entry->program_call); /* 0 means unknown, so an overflow must not return it */
    }
    return program_entry->program_call;
}

#if PY_VERSION_HEX >= 0x030C0000

static PyObject *disable_result; /* sys.monitoring.DISABLE: ends the events of one instruction */

/* Handle an event of the current frame. ``arguments`` begin with its code object. Return sys.monitoring.DISABLE in
 * libraries, so that their code runs at full speed. */
static PyObject *handle_frame_event(PyObject *const *arguments, Py_ssize_t count)
{
    if (count < 1 || !PyCode_Check(arguments[0]) || !cache_program_code((PyCodeObject *)arguments[0]))
        return Py_NewRef(disable_result);
    const Frame *frame = current_frame(PyThreadState_Get());
    if (frame && frame_code(frame) == (PyCodeObject *)arguments[0])
        begin_program_call(frame);
    Py_RETURN_NONE;
}

static PyObject *on_start_or_resume(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    (void)module;
    return handle_frame_event(arguments, count);
}

/* Handle a jump; ``arguments`` are the code object, the offset of the jump and that of its destination. */
static PyObject *on_jump(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    (void)module;
    const bool is_backward = count == 3 && PyLong_AsLong(arguments[2]) <= PyLong_AsLong(arguments[1]);
    return is_backward ? handle_frame_event(arguments, count) : Py_NewRef(disable_result);
}

static PyMethodDef FRAME_HANDLER = {"on_start_or_resume", (PyCFunction)(void (*)(void))on_start_or_resume,
                                    METH_FASTCALL, NULL};
static PyMethodDef JUMP_HANDLER = {"on_jump", (PyCFunction)(void (*)(void))on_jump, METH_FASTCALL, NULL};

static const struct {
    const char *event;
    PyMethodDef *handler;
} HANDLERS[] = {{"PY_START", &FRAME_HANDLER}, {"PY_RESUME", &FRAME_HANDLER}, {"JUMP", &JUMP_HANDLER}};

/* Register cudakit as a tool of sys.monitoring, and return the tool id, or -1 if no id is free. */
static int claim_tool(PyObject *monitoring)
{
    for (int tool_id = 4; tool_id >= 3; tool_id--) { /* 3 and 4 have no predefined use */
        PyObject *result = PyObject_CallMethod(monitoring, "use_tool_id", "is", tool_id, "cudakit");
        Py_XDECREF(result);
        if (result)
            return tool_id;
        PyErr_Clear();
    }
    return -1;
}

/* Register the handlers and enable their events. Return 0, or -1 with an exception set. */
static int enable_events(PyObject *monitoring, int tool_id)
{
    PyObject *events = PyObject_GetAttrString(monitoring, "events");
    long enabled_events = 0;
    for (size_t index = 0; events && index < sizeof HANDLERS / sizeof *HANDLERS; index++) {
        PyObject *event = PyObject_GetAttrString(events, HANDLERS[index].event);
        PyObject *handler = event ? PyCFunction_New(HANDLERS[index].handler, NULL) : NULL;
        PyObject *previous_handler =
            handler ? PyObject_CallMethod(monitoring, "register_callback", "iOO", tool_id, event, handler) : NULL;
        enabled_events |= event ? PyLong_AsLong(event) : 0;
        Py_XDECREF(event);
        Py_XDECREF(handler);
        if (!previous_handler)
            Py_CLEAR(events);
        Py_XDECREF(previous_handler);
    }
    PyObject *result =
        events ? PyObject_CallMethod(monitoring, "set_events", "il", tool_id, enabled_events) : NULL;
    Py_XDECREF(events);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Begin a program call of each frame that runs on this thread, because these frames had no event yet. */
static void begin_running_frames(PyThreadState *thread)
{
    for (const Frame *frame = nearest_complete_frame(current_frame(thread)); frame;
         frame = nearest_complete_frame(frame->previous))
        if (cache_program_code(frame_code(frame)))
            begin_program_call(frame);
}

static PyObject *watch_program_calls(PyObject *module, PyObject *arguments)
{
    (void)module;
    const char *library_pattern, *typed_pattern;
    if (!PyArg_ParseTuple(arguments, "ss", &library_pattern, &typed_pattern))
        return NULL;
    if (program_calls_are_watched)
        Py_RETURN_TRUE;
    PyObject *monitoring = PySys_GetObject("monitoring"); /* borrowed reference */
    const int tool_id = monitoring ? claim_tool(monitoring) : -1;
    if (tool_id < 0)
        Py_RETURN_FALSE;
    if (regcomp(&library_files, library_pattern, REG_EXTENDED | REG_NOSUB) ||
        regcomp(&typed_code, typed_pattern, REG_EXTENDED | REG_NOSUB)) {
        PyErr_SetString(PyExc_ValueError, "a pattern of library files is not valid");
        return NULL;
    }
    disable_result = PyObject_GetAttrString(monitoring, "DISABLE");
    if (!disable_result || enable_events(monitoring, tool_id))
        return NULL;
    begin_running_frames(PyThreadState_Get());
    program_calls_are_watched = true;
    Py_RETURN_TRUE;
}

#else

static PyObject *watch_program_calls(PyObject *module, PyObject *arguments)
{
    (void)module, (void)arguments, (void)cached_file_count;
    Py_RETURN_FALSE;
}

#endif

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
    uint32_t unsigned_value = 0;
    for (int shift = 0; bytes < end && shift < 32; shift += 6) {
        unsigned_value |= (uint32_t)(*bytes & 0x3f) << shift;
        if (!(*bytes++ & VARINT_MORE))
            break;
    }
    int32_t magnitude = (int32_t)(unsigned_value >> 1);
    return unsigned_value & 1 ? -magnitude : magnitude;
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

/* --- frames ------------------------------------------------------------------------------------ */

static int resolve_frame(uint64_t code, uint64_t offset, struct ck_frame *out)
{
    if (!code)
        return -1;
    PyCodeObject *code_object = (PyCodeObject *)(uintptr_t)code;
    copy_utf8(code_object->co_qualname, out->function, sizeof out->function);
    copy_utf8(code_object->co_filename, out->file, sizeof out->file);
    out->line = line_at(code_object, offset);
    return 0;
}

static const struct ck_walker WALKER = {walk_stack, resolve_frame, program_call};

/* --- module ----------------------------------------------------------------------------------- */

enum { STACK_LIMIT = 1024 };

static PyObject *frame_tuple(uint64_t code, uint64_t offset)
{
    struct ck_frame frame = {.line = 0};
    resolve_frame(code, offset, &frame);
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
    int depth = walk_stack(keys, codes, offsets, limit < STACK_LIMIT ? limit : STACK_LIMIT);
    return frame_list(codes, offsets, depth);
}

/* Return whether the frames read here are those that the interpreter reports. They differ if a patch release of
 * CPython changed the layout. */
static bool matches_interpreter(PyThreadState *thread)
{
    const Frame *frame = nearest_complete_frame(current_frame(thread));
    PyFrameObject *interpreter_frame = PyThreadState_GetFrame(thread);
    bool is_same = true;
    while (is_same && interpreter_frame) {
        PyCodeObject *code = PyFrame_GetCode(interpreter_frame);
        is_same = frame && frame_code(frame) == code &&
                  instruction_offset(frame, code) == (uint64_t)PyFrame_GetLasti(interpreter_frame);
        Py_DECREF(code);
        PyFrameObject *caller = is_same ? PyFrame_GetBack(interpreter_frame) : NULL;
        Py_SETREF(interpreter_frame, caller);
        frame = is_same ? nearest_complete_frame(frame->previous) : frame;
    }
    Py_XDECREF(interpreter_frame);
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

PyDoc_STRVAR(watch_program_calls_doc,
             "watch_program_calls(library_files, typed_code)\n--\n\n"
             "From now on, number the program calls: executions of instructions in the program's\n"
             "own code, by the two regular expressions of cudakit/stacks.py. Return False if that is\n"
             "impossible: before Python 3.12, and if other tools use all free tools of\n"
             "sys.monitoring.");

PyDoc_STRVAR(program_call_doc, "program_call()\n--\n\n"
                               "Return the number of the program call that the calling thread executes; 0 if it\n"
                               "is unknown.");

static PyObject *current_program_call(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromUnsignedLong(program_call());
}

static PyMethodDef METHODS[] = {
    {"watch_program_calls", watch_program_calls, METH_VARARGS, watch_program_calls_doc},
    {"program_call", current_program_call, METH_NOARGS, program_call_doc},
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
    .m_name = "cudakit.record._frames",
    .m_doc = "Reads the Python frames of the calling thread without the GIL.",
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__frames(void)
{
    return PyModuleDef_Init(&MODULE);
}
