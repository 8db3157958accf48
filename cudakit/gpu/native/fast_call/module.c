/* Calls of compiled kernels with arguments of a layout that an earlier call had: no Python code runs between the call
 * and cuLaunchKernel.
 *
 * FastCall is the base class of callables. A call whose arguments have the dtypes, shapes, strides and alignments of a
 * prepared launch is launched here. Every other call goes to the method _call of the subclass, which checks the
 * arguments, launches the kernel, and passes the launch to _prepare(). This file therefore raises no errors of its own.
 *
 * Arrays are read through the DLPack exchange API of their class: a table of C functions in the class attribute
 * __dlpack_c_exchange_api__ (dlpack.h, DLPackExchangeAPI, version 1.3). PyTorch implements it since 2.10. CuPy 14 does
 * not; its arrays and those of cudakit are read through attributes. All functions are called with the GIL held, except
 * cuLaunchKernel, which can wait for a full queue. */
#include <stddef.h>

#include "arrays.h"
#include "call.h"
#include "stream_call.h"

/* --- the counter of random number generators --- */

/* Return a tuple of the words of a counter. */
static PyObject *read_counter(PyObject *object, PyObject *args)
{
    const word *words = ((LaunchCounter *)object)->words;
    (void)args;
    return Py_BuildValue("KKK", words[0], words[1], words[2]);
}

/* Return whether the words of a counter equal the expected ones. A frozen counter equals none. */
static bool equals_words(const LaunchCounter *counter, const unsigned long long *expected)
{
    return !counter->is_frozen && counter->words[0] == expected[0] && counter->words[1] == expected[1] &&
           counter->words[2] == expected[2];
}

/* Replace the words of a counter if they equal the expected ones, and return whether they did. */
static PyObject *replace_counter(PyObject *object, PyObject *args)
{
    LaunchCounter *self = (LaunchCounter *)object;
    unsigned long long expected[3], words[3];
    if (!PyArg_ParseTuple(args, "(KKK)(KKK)", &expected[0], &expected[1], &expected[2], &words[0], &words[1],
                          &words[2]))
        return NULL;
    if (!equals_words(self, expected))
        Py_RETURN_FALSE;
    for (int i = 0; i < 3; i++)
        self->words[i] = words[i];
    Py_RETURN_TRUE;
}

/* Freeze a counter if its words equal the expected ones, and return whether they did. */
static PyObject *freeze_counter(PyObject *object, PyObject *args)
{
    LaunchCounter *self = (LaunchCounter *)object;
    unsigned long long expected[3];
    if (!PyArg_ParseTuple(args, "(KKK)", &expected[0], &expected[1], &expected[2]))
        return NULL;
    if (!equals_words(self, expected))
        Py_RETURN_FALSE;
    self->is_frozen = true;
    Py_RETURN_TRUE;
}

static PyMethodDef counter_methods[] = {
    {"read", read_counter, METH_NOARGS,
     PyDoc_STR("read()\n--\n\nReturn the position, the sequence and the seed.")},
    {"replace", replace_counter, METH_VARARGS,
     PyDoc_STR("replace(expected, words)\n--\n\nReplace the words; return False, changing nothing, if the words "
               "are not the expected ones or the counter is frozen.")},
    {"freeze", freeze_counter, METH_VARARGS,
     PyDoc_STR("freeze(expected)\n--\n\nPerform all later calls that use the counter in Python; return False, "
               "changing nothing, if the words are not the expected ones.")},
    {NULL, NULL, 0, NULL}};

static PyTypeObject launch_counter_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cudakit.gpu._fast_call.LaunchCounter",
    .tp_doc = PyDoc_STR("The counter of a random number generator, which prepared launches advance."),
    .tp_basicsize = sizeof(LaunchCounter),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_methods = counter_methods,
};

/* --- the class of callables --- */

PyDoc_STRVAR(
    prepare_doc,
    "_prepare(inputs, outputs, allocate, results, parameters, function, context, device, blocks, threads, "
    "stream, scratch, counter_step)\n--\n\n"
    "Prepare the launch of a call, so that equal calls run without Python; return whether that is possible.\n\n"
    "``allocate`` is a function of a stream handle that returns a tuple of new outputs, or None if the call "
    "passes\n"
    "outputs. Launches add ``counter_step`` to the position of the counter.");

PyDoc_STRVAR(configure_doc, "_configure(input_count, output_count, counter=None)\n--\n\n"
                            "Set the number of arguments, the number of outputs that ``out`` provides, and the\n"
                            "counter of kernels with parameters of the kind 'n'.");

/* Implement _configure(). */
static PyObject *configure(PyObject *object, PyObject *args)
{
    FastCall *self = (FastCall *)object;
    int inputs, outputs;
    PyObject *counter = NULL;
    if (!PyArg_ParseTuple(args, "ii|O!", &inputs, &outputs, &launch_counter_type, &counter))
        return NULL;
    Py_XSETREF(self->counter, (LaunchCounter *)Py_XNewRef(counter));
    bool is_small = inputs + outputs <= MAX_OPERANDS;
    self->input_count = is_small ? inputs : -1; /* no call has -1 arguments */
    self->output_count = is_small ? outputs : 0;
    Py_RETURN_NONE;
}

/* Create a FastCall object that has no prepared launch. */
static PyObject *new_object(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    (void)args;
    (void)keywords;
    FastCall *self = (FastCall *)type->tp_alloc(type, 0);
    if (self) {
        self->vectorcall = call_object;
        self->input_count = -1;
    }
    return (PyObject *)self;
}

/* Free all plans of a FastCall object, and the object. */
static void delete_object(PyObject *object)
{
    FastCall *self = (FastCall *)object;
    for (int i = 0; i < self->plan_count; i++)
        delete_plan(self->plans[i]);
    Py_XDECREF(self->counter);
    Py_TYPE(object)->tp_free(object);
}

static PyMethodDef object_methods[] = {{"_prepare", prepare, METH_VARARGS, prepare_doc},
                                       {"_configure", configure, METH_VARARGS, configure_doc},
                                       {NULL, NULL, 0, NULL}};

static PyTypeObject fast_call_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cudakit.gpu._fast_call.FastCall",
    .tp_doc = PyDoc_STR("The base class of callables that launch prepared kernels without Python code."),
    .tp_basicsize = sizeof(FastCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = new_object,
    .tp_dealloc = delete_object,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(FastCall, vectorcall),
    .tp_methods = object_methods,
};

PyDoc_STRVAR(
    use_driver_doc,
    "use_driver(launch, get_context, push_context, pop_context, is_capturing, allocate, free, device_type)\n--\n\n"
    "Set the addresses of the driver's functions, and the device type of DLPack whose arrays are accepted.");

/* Implement use_driver(). */
static PyObject *use_driver(PyObject *module, PyObject *args)
{
    unsigned long long addresses[7];
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKKKKKi", &addresses[0], &addresses[1], &addresses[2], &addresses[3],
                          &addresses[4], &addresses[5], &addresses[6], &accepted_device_type))
        return NULL;
    *(void **)&driver.launch = (void *)(uintptr_t)addresses[0];
    *(void **)&driver.get_context = (void *)(uintptr_t)addresses[1];
    *(void **)&driver.push_context = (void *)(uintptr_t)addresses[2];
    *(void **)&driver.pop_context = (void *)(uintptr_t)addresses[3];
    *(void **)&driver.is_capturing = (void *)(uintptr_t)addresses[4];
    *(void **)&driver.allocate = (void *)(uintptr_t)addresses[5];
    *(void **)&driver.free = (void *)(uintptr_t)addresses[6];
    Py_RETURN_NONE;
}

PyDoc_STRVAR(use_array_class_doc,
             "use_array_class(class, kind, current_stream, dtypes)\n--\n\n"
             "Read arrays of a class through attributes: 'c' those of CuPy's arrays, 'd' those of DeviceArray.\n\n"
             "``current_stream`` is CuPy's function of a device index, or the context variable of cudakit.\n"
             "``dtypes`` is a dict of dtypes: their codes of DLPack plus 256 times their bits.");

/* Implement use_array_class(). */
static PyObject *use_array_class(PyObject *module, PyObject *args)
{
    PyObject *type, *current_stream, *codes;
    int kind;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!COO!", &PyType_Type, &type, &kind, &current_stream, &PyDict_Type, &codes))
        return NULL;
    array_class *class = find_class((PyTypeObject *)type);
    if (!class)
        class = add_class((PyTypeObject *)type);
    if (class) {
        class->kind = (char)kind;
        Py_XSETREF(class->current_stream, Py_NewRef(current_stream));
        Py_XSETREF(dtype_codes, Py_NewRef(codes));
    }
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {{"use_driver", use_driver, METH_VARARGS, use_driver_doc},
                                       {"use_array_class", use_array_class, METH_VARARGS, use_array_class_doc},
                                       {NULL, NULL, 0, NULL}};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, .m_name = "cudakit.gpu._fast_call",
                                               .m_size = -1, .m_methods = module_methods};

PyMODINIT_FUNC PyInit__fast_call(void)
{
    const struct {
        PyObject **name;
        const char *text;
    } texts[] = {{&names.call, "_call"},
                 {&names.out, "out"},
                 {&names.stream, "stream"},
                 {&names.api, "__dlpack_c_exchange_api__"},
                 {&names.requires_grad, "requires_grad"},
                 {&names.is_neg, "is_neg"},
                 {&names.cuda_stream, "cuda_stream"},
                 {&names.allocation_stream, "allocation_stream"},
                 {&names.view, "view"},
                 {&names.ptr, "ptr"},
                 {&names.dtype, "dtype"},
                 {&names.shape, "shape"},
                 {&names.strides, "strides"},
                 {&names.read_only, "read_only"},
                 {&names.cuda_index, "cuda_index"},
                 {&names.data, "data"},
                 {&names.device_id, "device_id"},
                 {&names.gpu, "_gpu"},
                 {&names.memory, "_memory"},
                 {&names.other_streams, "_other_streams"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!(*texts[i].name = PyUnicode_InternFromString(texts[i].text)))
            return NULL;
    if (PyType_Ready(&fast_call_type) < 0 || PyType_Ready(&launch_counter_type) < 0 ||
        PyType_Ready(&stream_memory_type) < 0 || PyType_Ready(&array_factory_type) < 0 ||
        PyType_Ready(&stream_call_type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&module_definition);
    if (module && (PyModule_AddObjectRef(module, "FastCall", (PyObject *)&fast_call_type) < 0 ||
                   PyModule_AddObjectRef(module, "LaunchCounter", (PyObject *)&launch_counter_type) < 0 ||
                   PyModule_AddObjectRef(module, "StreamMemory", (PyObject *)&stream_memory_type) < 0 ||
                   PyModule_AddObjectRef(module, "ArrayFactory", (PyObject *)&array_factory_type) < 0 ||
                   PyModule_AddObjectRef(module, "StreamCall", (PyObject *)&stream_call_type) < 0))
        Py_CLEAR(module);
    return module;
}
