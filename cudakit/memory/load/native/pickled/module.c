/* The Python type PickledTree(buffer, seed, convert) and its methods, declared in _pickled.pyi.
 *
 * A rejected file raises ValueError(reason word, offset of the opcode); pickled.py makes it a sentence.
 */

#include "machine.h"
#include "queries.h"

#include <string.h>

static PyObject *new_text(const Tree *tree, Value blob)
{
    Span span = blob_at(tree, blob);
    return PyUnicode_DecodeUTF8((const char *)bytes_of(tree, span), (Py_ssize_t)span.size, NULL);
}

static PyObject *new_large_integer(const Tree *tree, Span span)
{
    Py_ssize_t size = (Py_ssize_t)span.size;
    PyObject *from_bytes = PyObject_GetAttrString((PyObject *)&PyLong_Type, "from_bytes");
    PyObject *args = Py_BuildValue("(y#s)", bytes_of(tree, span), size, "little");
    PyObject *keyword_args = Py_BuildValue("{sO}", "signed", Py_True);
    PyObject *integer = from_bytes && args && keyword_args ? PyObject_Call(from_bytes, args, keyword_args) : NULL;
    Py_XDECREF(from_bytes);
    Py_XDECREF(args);
    Py_XDECREF(keyword_args);
    return integer;
}

/* Returns a scalar as a Python object; None for other nodes. */
static PyObject *new_scalar(const Tree *tree, Value node)
{
    bool is_blob = TAG(node) >= BIG_INT && TAG(node) <= BYTES;
    Span span = is_blob ? blob_at(tree, node) : (Span){0};
    const char *bytes = is_blob ? (const char *)bytes_of(tree, span) : NULL;
    switch (TAG(node)) {
    case CONSTANT:
        if (PAYLOAD(node) == IS_NONE)
            Py_RETURN_NONE;
        return PyBool_FromLong(PAYLOAD(node) == IS_TRUE);
    case SMALL_INT: return PyLong_FromLongLong(small_int(node));
    case BIG_INT: return new_large_integer(tree, span);
    case FLOAT: return PyFloat_FromDouble(span.size == 8 ? PyFloat_Unpack8(bytes, 0) : 0);
    case TEXT: return new_text(tree, node);
    case BYTES: return PyBytes_FromStringAndSize(bytes, (Py_ssize_t)span.size);
    default: return Py_NewRef(Py_None);
    }
}

/* Returns a Python dict from keys, in the order of the file, to the handles of their values. */
static PyObject *new_members(const Tree *tree, const Dict *dict)
{
    uint32_t length = shape_at(tree, dict->shape)->length;
    uint32_t *keys = PyMem_Calloc(length + (size_t)1, sizeof(uint32_t));
    PyObject *members = keys ? PyDict_New() : PyErr_NoMemory();
    for (uint32_t shape = dict->shape; keys && shape; shape = shape_at(tree, shape)->parent)
        keys[shape_at(tree, shape)->length - 1] = shape_at(tree, shape)->key;
    for (uint32_t i = 0; members && i < length; i++) {
        PyObject *key = new_text(tree, keys[i]);
        PyObject *handle = PyLong_FromUnsignedLongLong(dict->values[i]);
        if (!key || !handle || PyDict_SetItem(members, key, handle) < 0)
            Py_CLEAR(members);
        Py_XDECREF(key);
        Py_XDECREF(handle);
    }
    PyMem_Free(keys);
    return members;
}

static const char *kind_name(Value node)
{
    static const char *const kind_names[] = {
        "NoneType", "bool", "int", "int", "float", "text", "bytes", "a list", "a dictionary",
    };
    // NOLINTNEXTLINE(clang-analyzer-security.ArrayBound): handles have no other tag
    return node == MAKE(CONSTANT, IS_NONE) ? "NoneType" : kind_names[TAG(node)];
}

static PyObject *raise_value_error(PyObject *words)
{
    if (words)
        PyErr_SetObject(PyExc_ValueError, words);
    Py_XDECREF(words);
    return NULL;
}

static PyObject *raise_rejection(const Query *query)
{
    if (!strcmp(query->reason, "memory"))
        return PyErr_NoMemory();
    if (!strcmp(query->reason, "kind") || !strcmp(query->reason, "keys"))
        return raise_value_error(Py_BuildValue("(ss)", query->reason, kind_name(query->node)));
    return PyErr_Format(PyExc_IndexError, "%s: %llu", query->reason, (unsigned long long)query->node);
}

static bool parse_handle(const Tree *tree, PyObject *argument, Value *handle)
{
    PyObject *index = PyNumber_Index(argument);
    *handle = index ? PyLong_AsUnsignedLongLong(index) : 0;
    Py_XDECREF(index);
    if (!PyErr_Occurred() && !is_node(tree, *handle))
        PyErr_Format(PyExc_IndexError, "handle: %llu", (unsigned long long)*handle);
    return !PyErr_Occurred();
}

static PyObject *tree_kind(PyObject *self, PyObject *argument)
{
    Value handle;
    bool is_valid = parse_handle((Tree *)self, argument, &handle);
    return is_valid ? PyUnicode_FromString(kind_name(handle)) : NULL;
}

static PyObject *tree_scalar(PyObject *self, PyObject *argument)
{
    Value handle;
    bool is_valid = parse_handle((Tree *)self, argument, &handle);
    return is_valid ? new_scalar((Tree *)self, handle) : NULL;
}

static PyObject *tree_members(PyObject *self, PyObject *argument)
{
    Query query = {.tree = (Tree *)self};
    Value handle;
    if (!parse_handle(query.tree, argument, &handle))
        return NULL;
    if (!expect_tag(&query, handle, DICT))
        return raise_rejection(&query);
    const Dict *dict = dict_at(query.tree, handle);
    if (shape_at(query.tree, dict->shape)->length > query.tree->max_keys) {
        reject(&query, "keys", handle);
        return raise_rejection(&query);
    }
    return new_members(query.tree, dict);
}

/* Returns the number of items of a list or of keys of a dictionary; 0 for a scalar. */
static PyObject *tree_length(PyObject *self, PyObject *argument)
{
    const Tree *tree = (Tree *)self;
    Value handle;
    if (!parse_handle(tree, argument, &handle))
        return NULL;
    uint32_t length = 0;
    if (TAG(handle) == LIST)
        length = list_at(tree, handle)->length;
    else if (TAG(handle) == DICT)
        length = shape_at(tree, dict_at(tree, handle)->shape)->length;
    return PyLong_FromUnsignedLong(length);
}

/* The arguments of a query: handles, and one or two arrays for the results. */
typedef struct {
    Py_buffer handles, out, out2;
} Arrays;

static bool check_array(const Py_buffer *array, uint64_t count, uint64_t item_bytes)
{
    bool is_aligned = !array->len || (uintptr_t)array->buf % item_bytes == 0;
    if (!is_aligned || (uint64_t)array->len / item_bytes < count)
        PyErr_SetString(PyExc_TypeError, "an array is too short or not aligned");
    return !PyErr_Occurred();
}

static void release(Py_buffer *array)
{
    if (array->obj)
        PyBuffer_Release(array);
}

/* Runs a query. If an item size is 0, `run` checks the size of the array. */
static PyObject *run_query(Query *query, Arrays *arrays, bool (*run)(Query *), unsigned out_item_bytes,
                           unsigned out2_item_bytes)
{
    query->handles = arrays->handles.buf;
    query->count = (uint64_t)arrays->handles.len / sizeof(Value);
    query->out = arrays->out.buf;
    query->out_bytes = (uint64_t)arrays->out.len;
    query->out2 = arrays->out2.buf;
    bool is_valid = check_array(&arrays->handles, query->count, sizeof(Value)) &&
                    (!out_item_bytes || check_array(&arrays->out, query->count, out_item_bytes)) &&
                    (!out2_item_bytes || check_array(&arrays->out2, query->count, out2_item_bytes));
    if (is_valid) {
        Py_BEGIN_ALLOW_THREADS
        is_valid = run(query);
        Py_END_ALLOW_THREADS
        if (!is_valid)
            raise_rejection(query);
    }
    release(&arrays->handles);
    release(&arrays->out);
    release(&arrays->out2);
    return is_valid ? Py_NewRef(Py_None) : NULL;
}

static PyObject *parse_and_run(PyObject *self, PyObject *args, const char *format, bool (*run)(Query *),
                               unsigned out_item_bytes, unsigned out2_item_bytes)
{
    Query query = {.tree = (Tree *)self};
    Arrays arrays = {0};
    if (!PyArg_ParseTuple(args, format, &arrays.handles, &arrays.out, &arrays.out2))
        return NULL;
    return run_query(&query, &arrays, run, out_item_bytes, out2_item_bytes);
}

/* Appends the text of a node, or the empty text, to a list; 0 if an exception is set. */
static int append_text(const Tree *tree, Value handle, PyObject *texts)
{
    if (!is_node(tree, handle)) {
        PyErr_Format(PyExc_IndexError, "handle: %llu", (unsigned long long)handle);
        return 0;
    }
    PyObject *text = TAG(handle) == TEXT ? new_text(tree, handle) : PyUnicode_FromStringAndSize("", 0);
    int is_appended = text && PyList_Append(texts, text) == 0;
    Py_XDECREF(text);
    return is_appended;
}

static PyObject *tree_texts(PyObject *self, PyObject *argument)
{
    Py_buffer handles;
    if (PyObject_GetBuffer(argument, &handles, PyBUF_SIMPLE))
        return NULL;
    PyObject *texts = check_array(&handles, 0, sizeof(Value)) ? PyList_New(0) : NULL;
    uint64_t handle_count = (uint64_t)handles.len / sizeof(Value);
    for (uint64_t i = 0; texts && i < handle_count; i++)
        if (!append_text((Tree *)self, ((const Value *)handles.buf)[i], texts))
            Py_CLEAR(texts);
    PyBuffer_Release(&handles);
    return texts;
}

static PyObject *tree_lengths(PyObject *self, PyObject *args)
{
    return parse_and_run(self, args, "y*w*:lengths", read_lengths, sizeof(int64_t), 0);
}

static PyObject *tree_gather(PyObject *self, PyObject *args)
{
    return parse_and_run(self, args, "y*w*:gather", gather_items, 0, 0);
}

static PyObject *tree_integers(PyObject *self, PyObject *args)
{
    return parse_and_run(self, args, "y*w*w*:integers", read_integers, sizeof(int64_t), 1);
}

static PyObject *tree_intern(PyObject *self, PyObject *args)
{
    return parse_and_run(self, args, "y*w*w*:intern", intern_nodes, sizeof(int32_t), sizeof(Value));
}

/* Returns the blob of a key; NOT_FOUND, which is in no shape, if the file has no such text. */
static uint32_t key_number(const Tree *tree, PyObject *key)
{
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(key, &size);
    if (!text) {
        PyErr_Clear(); /* no text of a file has a lone surrogate */
        return NOT_FOUND;
    }
    uint32_t hash = hash_bytes(tree->hash_key, text, (uint64_t)size);
    return find_blob(tree, text, (uint64_t)size, hash);
}

static PyObject *tree_column(PyObject *self, PyObject *args)
{
    Query query = {.tree = (Tree *)self};
    Arrays arrays = {0};
    PyObject *key;
    if (!PyArg_ParseTuple(args, "y*w*U:column", &arrays.handles, &arrays.out, &key))
        return NULL;
    query.key = key_number(query.tree, key);
    return run_query(&query, &arrays, look_up_key, sizeof(Value), 0);
}

static PyObject *tree_root(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(((Tree *)self)->root);
}

static void tree_dealloc(PyObject *self)
{
    Tree *tree = (Tree *)self;
    PyTypeObject *type = Py_TYPE(self);
    tree_free(tree);
    release(&tree->file);
    type->tp_free(self);
    Py_DECREF(type);
}

static bool read_pickle(Tree *tree, PyObject *convert)
{
    Machine m = {
        .tree = tree,
        .data = tree->file.buf,
        .size = (uint64_t)tree->file.len,
        .convert = convert,
    };
    bool is_accepted = run_machine(&m);
    if (!is_accepted && !strcmp(m.failure, "memory"))
        PyErr_NoMemory();
    else if (!is_accepted && strcmp(m.failure, "raised"))
        raise_value_error(Py_BuildValue("(sK)", m.failure, (unsigned long long)m.opcode_at));
    return is_accepted;
}

static PyObject *tree_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *argument_names[] = {"buffer", "seed", "convert", "memory_limit", "max_keys", NULL};
    PyObject *buffer, *convert;
    const char *seed;
    Py_ssize_t seed_bytes;
    unsigned long long memory_limit, max_keys;
    if (!PyArg_ParseTupleAndKeywords(args, named, "Oy#OKK:PickledTree", argument_names, &buffer, &seed,
                                     &seed_bytes, &convert, &memory_limit, &max_keys))
        return NULL;
    Tree *tree = (Tree *)type->tp_alloc(type, 0);
    if (!tree)
        return NULL;
    tree->memory_limit = memory_limit;
    tree->max_keys = max_keys;
    memcpy(tree->hash_key, seed, Py_MIN((size_t)seed_bytes, sizeof tree->hash_key));
    if (PyObject_GetBuffer(buffer, &tree->file, PyBUF_SIMPLE) == 0 && read_pickle(tree, convert))
        return (PyObject *)tree;
    Py_DECREF(tree);
    return NULL;
}

static PyMethodDef tree_methods[] = {
    {"kind", tree_kind, METH_O, "Return the kind of a node."},
    {"scalar", tree_scalar, METH_O, "Return a scalar as a Python object."},
    {"length", tree_length, METH_O, "Return the number of items of a list, or of keys of a dictionary."},
    {"texts", tree_texts, METH_O, "Return the texts of nodes; the empty text for other nodes."},
    {"members", tree_members, METH_O, "Return a dict from the keys of a dictionary to the handles of its values."},
    {"lengths", tree_lengths, METH_VARARGS, "Count the items of lists."},
    {"gather", tree_gather, METH_VARARGS, "Concatenate the items of lists."},
    {"column", tree_column, METH_VARARGS, "Return the values of one key in many dictionaries."},
    {"integers", tree_integers, METH_VARARGS, "Return integers, and which nodes are integers."},
    {"intern", tree_intern, METH_VARARGS, "Give nodes of equal content the same number."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef tree_attributes[] = {
    {"root", tree_root, NULL, "The handle of the outermost object.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot tree_slots[] = {
    {Py_tp_doc, "The parsed content of a pickle of plain data."},
    {Py_tp_new, tree_new},
    {Py_tp_dealloc, tree_dealloc},
    {Py_tp_methods, tree_methods},
    {Py_tp_getset, tree_attributes},
    {0, NULL},
};

static PyType_Spec tree_spec = {
    .name = "cudakit.memory.load._pickled.PickledTree",
    .basicsize = sizeof(Tree),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = tree_slots,
};

static int add_type(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&tree_spec);
    int status = type ? PyModule_AddObjectRef(module, "PickledTree", type) : -1;
    Py_XDECREF(type);
    return status;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, add_type},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* a tree does not change once it is read */
#endif
    {0, NULL},
};

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_pickled",
    .m_doc = "The native reader of pickles of plain data.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__pickled(void)
{
    return PyModuleDef_Init(&module_definition);
}
