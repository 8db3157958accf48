/* A call: find its plan, allocate its outputs, and launch its kernel. */
#include "call.h"

#include <string.h>

#include "arrays.h"

/* Launch the kernel of a plan. Return false if _call must perform the call, or report its error. */
static bool launch_plan(FastCall *self, const prepared_launch *plan, const operand *operands, handle stream)
{
    LaunchCounter *counter = self->counter;
    union {
        word bits;
        float single;
        double real;
        int64_t integer;
        bool truth;
    } values[MAX_PARAMETERS];
    void *parameters[MAX_PARAMETERS];
    for (int i = 0; i < plan->parameter_count; i++) {
        const parameter *plan_parameter = &plan->parameters[i];
        parameters[i] = &values[i];
        if (plan_parameter->kind == 'n') {
            values[i].bits = counter->words[plan_parameter->operand];
            continue;
        }
        const operand *source_operand = &operands[plan_parameter->operand];
        double real = source_operand->kind == 'f' ? source_operand->real : (double)source_operand->integer;
        switch (plan_parameter->kind) {
        case 'a': values[i].bits = source_operand->address; break;
        case 's':
            values[i].bits = plan->uses_scratch ? find_scratch(plan, stream) : 0;
            if (plan->uses_scratch && !values[i].bits)
                return false;
            break;
        case 'f': values[i].single = (float)real; break;
        case 'd': values[i].real = real; break;
        case 'q': values[i].integer = source_operand->integer; break;
        case '?': values[i].truth = source_operand->integer != 0; break;
        default: parameters[i] = (void *)(plan->constants + plan_parameter->offset);
        }
    }
    if (plan->uses_scratch || plan->uses_counter) { /* _call performs captured launches with memory of their own */
        int capture_status = 0;
        if (driver.is_capturing(stream, &capture_status) || capture_status)
            return false;
    }
    if (plan->uses_counter) { /* changed while the GIL is held, so that no two launches get the same numbers */
        if (counter->is_frozen || counter->words[0] > UINT64_MAX - plan->counter_step)
            return false;
        counter->words[0] += plan->counter_step;
    }
    handle function = plan->function, context = plan->context;
    unsigned blocks = plan->blocks, threads = plan->threads;
    int status = -1;
    bool was_current;
    Py_BEGIN_ALLOW_THREADS;
    if (enter_context(context, &was_current)) {
        status = driver.launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, NULL);
        leave_context(was_current);
    }
    Py_END_ALLOW_THREADS;
    return !status;
}

/* Receives the message of a failed allocation; _call then allocates again, and reports the error. */
static void ignore_error(void *error_context, const char *kind, const char *message)
{
    (void)error_context;
    (void)kind;
    (void)message;
}

/* Set the key indices of the outputs that a plan allocates. The keys follow those of the inputs. */
static void locate_output_keys(FastCall *self, const prepared_launch *plan, operand *operands)
{
    int key_start = plan->key_words;
    for (int i = self->input_count; i < plan->operand_count; i++) {
        int dimensions = (int)(plan->key[key_start] >> 32 & 0xFF);
        operands[i] = (operand){.kind = 'a', .key_start = key_start, .key_end = key_start + 1 + 2 * dimensions};
        key_start = operands[i].key_end;
    }
}

/* Allocate the outputs of a plan by the exchange API, with the dtypes and shapes of its key. Return false after a
 * failure. */
static bool allocate_tensors(FastCall *self, const prepared_launch *plan, operand *operands,
                             const exchange_api *api, managed_tensor **outputs)
{
    for (int i = 0; i < self->output_count; i++) {
        int index = self->input_count + i;
        operand *output = &operands[index];
        word shape[MAX_KEY_WORDS];
        const word *key = plan->key + output->key_start;
        int dimensions = (int)(key[0] >> 32 & 0xFF);

        memcpy(shape, key + 1, (size_t)dimensions * sizeof *shape);
        dl_tensor prototype = {.device_type = accepted_device_type,
                               .device_id = plan->device_id,
                               .dimensions = dimensions,
                               .code = (uint8_t)(key[0] >> 8),
                               .bits = (uint8_t)(key[0] >> 16),
                               .lanes = 1,
                               .shape = (int64_t *)shape};
        if (api->allocate(&prototype, &outputs[i], NULL, ignore_error) || !outputs[i])
            return false;
        output->address = (word)(uintptr_t)outputs[i]->tensor.data + outputs[i]->tensor.byte_offset;
        if (output->address % ALIGNMENT)
            return false;
    }
    return true;
}

/* Read an output that the Python function of a plan allocated, into an operand with the key indices of the output.
 * Return false, possibly with an exception, for an output that differs from that of the plan. */
static bool read_new_output(const prepared_launch *plan, PyObject *object, operand *output)
{
    const word *expected_key = plan->key + output->key_start;
    const array_class *class = find_class(Py_TYPE(object));
    if (class && class->kind == 'c') { /* CuPy creates arrays of the dtype and shape that the function requests */
        PyObject *memory = PyObject_GetAttr(object, names.data);
        output->address = (word)integer_attribute(memory, names.ptr);
        int64_t device_id = integer_attribute(memory, names.device_id);
        Py_XDECREF(memory);
        return !PyErr_Occurred() && device_id == plan->device_id &&
               output->address % ALIGNMENT == expected_key[0] >> 48;
    }
    word key[MAX_KEY_WORDS];
    int key_start = output->key_start;
    int word_count = read_operand(object, true, output, key, 0);
    bool is_valid = word_count > 0 && output->kind == 'a' && output->device_id == plan->device_id &&
                    !memcmp(key, expected_key, (size_t)word_count * sizeof *key);
    output->key_start = key_start;
    output->key_end = key_start + word_count;
    return is_valid;
}

/* Allocate the outputs of a plan by its factory or its Python function. Store their addresses in ``operands``.
 * Return a new reference to a tuple of outputs. Return NULL without an exception after a failure, or if the plan
 * expects other outputs. */
static PyObject *allocate_arrays(FastCall *self, const prepared_launch *plan, operand *operands, handle stream)
{
    word addresses[MAX_OPERANDS];
    if (Py_TYPE(plan->allocate) == &array_factory_type) {
        PyObject *arrays = new_arrays((ArrayFactory *)plan->allocate, stream, addresses);
        PyErr_Clear();
        for (int i = 0; arrays && i < self->output_count; i++)
            operands[self->input_count + i].address = addresses[i];
        return arrays;
    }
    PyObject *stream_handle = PyLong_FromVoidPtr(stream);
    PyObject *outputs = stream_handle ? PyObject_CallOneArg(plan->allocate, stream_handle) : NULL;
    Py_XDECREF(stream_handle);
    bool is_valid = outputs && PyTuple_CheckExact(outputs) && PyTuple_GET_SIZE(outputs) == self->output_count;
    for (int i = 0; is_valid && i < self->output_count; i++)
        is_valid = read_new_output(plan, PyTuple_GET_ITEM(outputs, i), &operands[self->input_count + i]);
    PyErr_Clear();
    if (!is_valid)
        Py_CLEAR(outputs);
    return outputs;
}

/* Delete the outputs that no result owns. */
static void delete_outputs(managed_tensor **outputs, int output_count)
{
    for (int i = 0; i < output_count; i++)
        if (outputs[i] && outputs[i]->deleter)
            outputs[i]->deleter(outputs[i]);
}

/* The arguments of a call. `out` and `stream` are NULL if they are missing or None. */
typedef struct {
    PyObject *const *inputs;
    PyObject *out, *stream;
} call_arguments;

/* Return false unless all inputs are passed by position, and only `out` and `stream` by name. */
static bool parse_arguments(FastCall *self, PyObject *const *args, Py_ssize_t position_count,
                            PyObject *keyword_names, call_arguments *arguments)
{
    *arguments = (call_arguments){args, NULL, NULL};
    if (position_count != self->input_count)
        return false;
    for (Py_ssize_t i = 0; keyword_names && i < PyTuple_GET_SIZE(keyword_names); i++) {
        PyObject *name = PyTuple_GET_ITEM(keyword_names, i), *value = args[position_count + i];
        if (value == Py_None)
            value = NULL;
        if (name == names.out || PyUnicode_Compare(name, names.out) == 0)
            arguments->out = value;
        else if (name == names.stream || PyUnicode_Compare(name, names.stream) == 0)
            arguments->stream = value;
        else
            return false;
    }
    return true;
}

/* Read the operands of a call and build its key. Return the number of words, or -1 for calls that are not prepared. */
static int read_operands(FastCall *self, const call_arguments *arguments, operand *operands, word *key,
                         int *first_array)
{
    int word_count = 0;
    PyObject *const *outputs = &arguments->out;
    if (arguments->out && PyTuple_CheckExact(arguments->out)) {
        if (PyTuple_GET_SIZE(arguments->out) != self->output_count)
            return -1;
        outputs = &PyTuple_GET_ITEM(arguments->out, 0);
    } else if (arguments->out && self->output_count != 1) {
        return -1;
    }
    int operand_count = self->input_count + (arguments->out ? self->output_count : 0);
    *first_array = -1;
    for (int i = 0; i < operand_count; i++) {
        bool is_output = i >= self->input_count;
        PyObject *object = is_output ? outputs[i - self->input_count] : arguments->inputs[i];
        word_count = read_operand(object, is_output, &operands[i], key, word_count);
        if (word_count < 0)
            return -1;
        if (operands[i].kind != 'a') {
            if (is_output)
                return -1;
        } else if (*first_array < 0) {
            *first_array = i;
        } else if (operands[i].device_id != operands[*first_array].device_id) {
            return -1;
        }
    }
    return *first_array < 0 ? -1 : word_count;
}

/* The new outputs of a call. One of the two members is used. */
typedef struct {
    managed_tensor *tensors[MAX_OPERANDS]; /* tensors that the exchange API allocated */
    PyObject *arrays;                      /* tuple of arrays that the plan's function allocated */
} new_outputs;

/* Return a new reference to a result of a call: an argument, or an allocated output, whose ownership moves. */
static PyObject *result_object(FastCall *self, const call_arguments *arguments, int index, const exchange_api *api,
                               new_outputs *outputs)
{
    if (index < self->input_count)
        return Py_NewRef(arguments->inputs[index]);
    int output = index - self->input_count;
    if (arguments->out)
        return Py_NewRef(PyTuple_CheckExact(arguments->out) ? PyTuple_GET_ITEM(arguments->out, output)
                                                            : arguments->out);
    if (outputs->arrays)
        return Py_NewRef(PyTuple_GET_ITEM(outputs->arrays, output));
    void *object = NULL;
    managed_tensor *tensor = outputs->tensors[output];
    outputs->tensors[output] = NULL;
    return api->object_from_managed(tensor, &object) ? NULL : object;
}

/* Return a new reference to the result of a call, a tuple if the call has several results. */
static PyObject *make_results(FastCall *self, const prepared_launch *plan, const call_arguments *arguments,
                              const exchange_api *api, new_outputs *outputs)
{
    if (plan->result_count == 1)
        return result_object(self, arguments, plan->results[0], api, outputs);
    PyObject *tuple = PyTuple_New(plan->result_count);
    for (int i = 0; tuple && i < plan->result_count; i++) {
        PyObject *result = result_object(self, arguments, plan->results[i], api, outputs);
        if (!result)
            Py_CLEAR(tuple);
        else
            PyTuple_SET_ITEM(tuple, i, result);
    }
    return tuple;
}

/* Return whether all arrays of a call can be used on a stream without waiting for other streams. */
static bool matches_streams(const prepared_launch *plan, const operand *operands, handle stream)
{
    for (int i = 0; i < plan->operand_count; i++)
        for (int j = 0; j < 2; j++)
            if (operands[i].streams[j] && operands[i].streams[j] != (word)(uintptr_t)stream)
                return false;
    return true;
}

/* Perform a call whose launch is prepared. Return NULL without an exception for other calls. */
static PyObject *call_prepared(FastCall *self, const call_arguments *arguments)
{
    operand operands[MAX_OPERANDS];
    word key[MAX_KEY_WORDS];
    new_outputs outputs;
    int first_array;
    handle stream = NULL;
    bool allocates = !arguments->out && self->output_count > 0;

    int word_count = read_operands(self, arguments, operands, key, &first_array);
    if (word_count < 0 || (allocates && arguments->stream))
        return NULL;
    prepared_launch *plan = find_plan(self, key, word_count, allocates);
    const exchange_api *api = operands[first_array].class->api;
    if (!plan || plan->device_id != operands[first_array].device_id || (allocates && !api && !plan->allocate) ||
        !find_stream(arguments->stream, &operands[first_array], &stream)) {
        PyErr_Clear();
        return NULL;
    }
    for (int i = 0; i < self->input_count; i++) /* the kernel updates inputs that are also outputs */
        if (plan->is_output[i] && operands[i].class->api &&
            is_true(arguments->inputs[i], names.requires_grad, false))
            return NULL;
    PyObject *result = NULL;
    bool is_allocated = true;
    plan->active_calls++;
    outputs.arrays = NULL;
    if (allocates) {
        memset(outputs.tensors, 0, sizeof outputs.tensors);
        locate_output_keys(self, plan, operands);
        if (api) {
            is_allocated = allocate_tensors(self, plan, operands, api, outputs.tensors);
        } else {
            outputs.arrays = allocate_arrays(self, plan, operands, stream);
            is_allocated = outputs.arrays != NULL;
        }
    }
    if (is_allocated && matches_streams(plan, operands, stream) && !has_overlap(plan, operands) &&
        launch_plan(self, plan, operands, stream))
        result = make_results(self, plan, arguments, api, &outputs);
    plan->active_calls--;
    if (allocates && api)
        delete_outputs(outputs.tensors, self->output_count);
    Py_XDECREF(outputs.arrays);
    return result;
}

PyObject *call_object(PyObject *object, PyObject *const *args, size_t flags, PyObject *keyword_names)
{
    FastCall *self = (FastCall *)object;
    Py_ssize_t position_count = PyVectorcall_NARGS(flags),
               argument_count = position_count + (keyword_names ? PyTuple_GET_SIZE(keyword_names) : 0);
    call_arguments arguments;

    if (self->plan_count && driver.launch &&
        parse_arguments(self, args, position_count, keyword_names, &arguments)) {
        PyObject *result = call_prepared(self, &arguments);
        if (result || PyErr_Occurred())
            return result;
    }
    PyObject **all_arguments = PyMem_Malloc((size_t)(argument_count + 1) * sizeof *all_arguments);
    if (!all_arguments)
        return PyErr_NoMemory();
    all_arguments[0] = object;
    memcpy(all_arguments + 1, args, (size_t)argument_count * sizeof *all_arguments);
    PyObject *result =
        PyObject_VectorcallMethod(names.call, all_arguments, (size_t)position_count + 1, keyword_names);
    PyMem_Free(all_arguments);
    return result;
}
