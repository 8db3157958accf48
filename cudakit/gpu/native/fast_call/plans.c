#include "plans.h"

#include <string.h>

bool has_overlap(const prepared_launch *plan, const operand *operands)
{
    for (int i = 0; i < plan->operand_count; i++) {
        if (!plan->is_output[i])
            continue;
        const operand *output = &operands[i];
        for (int j = 0; j < plan->operand_count; j++) {
            const operand *other_operand = &operands[j];
            if (i == j || other_operand->kind != 'a')
                continue;
            if (output->address + (word)plan->first_offset[i] >=
                    other_operand->address + (word)plan->end_offset[j] ||
                other_operand->address + (word)plan->first_offset[j] >=
                    output->address + (word)plan->end_offset[i])
                continue;
            int word_count = output->key_end - output->key_start;
            bool is_same = output->address == other_operand->address &&word_count ==
                               other_operand->key_end - other_operand->key_start &&
                           !memcmp(plan->key + output->key_start, plan->key + other_operand->key_start,
                                   (size_t)word_count * sizeof *plan->key);
            if (!is_same || plan->is_output[j])
                return true;
        }
    }
    return false;
}

prepared_launch *find_plan(FastCall *self, const word *key, int word_count, bool allocates)
{
    for (int i = 0; i < self->plan_count; i++) {
        prepared_launch *plan = self->plans[i];
        if (plan->key_words == word_count && plan->allocates == allocates &&
            !memcmp(plan->key, key, (size_t)word_count * sizeof *key)) {
            memmove(self->plans + 1, self->plans, (size_t)i * sizeof *self->plans);
            self->plans[0] = plan;
            return plan;
        }
    }
    return NULL;
}

word find_scratch(const prepared_launch *plan, handle stream)
{
    for (int i = 0; i < plan->scratch_count; i++)
        if (plan->scratch[i].stream == stream)
            return plan->scratch[i].address;
    return 0;
}

/* --- preparation of launches --- */

/* Compute the byte range of an array from the words of its key. */
static void find_byte_range(prepared_launch *plan, int index, const word *key)
{
    int dimensions = (int)(key[0] >> 32 & 0xFF);
    int64_t element_bytes = (int64_t)(key[0] >> 16 & 0xFF) / 8, first_offset = 0, end_offset = element_bytes;

    for (int i = 0; i < dimensions; i++) {
        int64_t size = (int64_t)key[1 + i];
        int64_t extent = (size - 1) * (int64_t)key[1 + dimensions + i] * element_bytes;
        if (size == 0)
            end_offset = 0;
        *(extent < 0 ? &first_offset : &end_offset) += extent;
    }
    plan->first_offset[index] = first_offset;
    plan->end_offset[index] = end_offset;
}

/* Read the operands of a prepared call into a plan: the key, and the byte ranges of arrays. Return false for operands
 * that the fast path does not handle. */
static bool prepare_operands(FastCall *self, prepared_launch *plan, PyObject *inputs, PyObject *outputs)
{
    int word_count = 0;
    plan->operand_count = self->input_count + self->output_count;
    for (int i = 0; i < plan->operand_count; i++) {
        bool is_input = i < self->input_count;
        PyObject *object =
            is_input ? PyTuple_GET_ITEM(inputs, i) : PyTuple_GET_ITEM(outputs, i - self->input_count);
        operand operand;
        if (plan->allocates && i == self->input_count)
            plan->key_words = word_count;
        word_count = read_operand(object, !is_input, &operand, plan->key, word_count);
        if (word_count < 0)
            return false;
        if (operand.kind == 'a')
            find_byte_range(plan, i, plan->key + operand.key_start);
    }
    if (!plan->allocates)
        plan->key_words = word_count;
    return true;
}

/* Read the parameters of a launch: tuples of a kind, the index of an operand, and the bytes of a constant. Return
 * false if the fast path does not handle a parameter, such as a word of the counter without a counter. */
static bool prepare_parameters(prepared_launch *plan, PyObject *parameters, bool has_counter)
{
    Py_ssize_t used_bytes = 0;
    plan->parameter_count = (int)PyTuple_GET_SIZE(parameters);
    if (plan->parameter_count > MAX_PARAMETERS)
        return false;
    for (int i = 0; i < plan->parameter_count; i++) {
        parameter *plan_parameter = &plan->parameters[i];
        const char *constant;
        Py_ssize_t constant_bytes;
        int kind;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(parameters, i), "Ciy#", &kind, &plan_parameter->operand, &constant,
                              &constant_bytes))
            return false;
        plan_parameter->kind = (char)kind;
        int operand_limit = kind == 'n' ? 3 : plan->operand_count;
        plan->uses_counter = plan->uses_counter || kind == 'n';
        if (plan_parameter->operand < 0 || plan_parameter->operand >= operand_limit ||
            (kind == 'n' && !has_counter) || used_bytes + constant_bytes > MAX_CONSTANT_BYTES)
            return false;
        plan_parameter->offset = (int)used_bytes;
        memcpy(plan->constants + used_bytes, constant, (size_t)constant_bytes);
        used_bytes += (constant_bytes + 15) / 16 * 16; /* 16 bytes are the largest alignment of a parameter */
        if (used_bytes > MAX_CONSTANT_BYTES)
            used_bytes = MAX_CONSTANT_BYTES;
    }
    return true;
}

/* Add the scratch memory of a stream to a plan. A new stream replaces the first one if the table is full. */
static void add_scratch(prepared_launch *plan, handle stream, word address)
{
    if (!address || find_scratch(plan, stream))
        return;
    int index = plan->scratch_count < MAX_SCRATCH ? plan->scratch_count++ : 0;
    plan->scratch[index].stream = stream;
    plan->scratch[index].address = address;
}

void delete_plan(prepared_launch *plan)
{
    if (plan)
        Py_XDECREF(plan->allocate);
    PyMem_Free(plan);
}

/* Insert a plan in front of all others. Return false if the oldest plan of a full table is in use. */
static bool insert_plan(FastCall *self, prepared_launch *new_plan)
{
    if (self->plan_count == MAX_PLANS) {
        prepared_launch *oldest_plan = self->plans[MAX_PLANS - 1];
        if (oldest_plan->active_calls)
            return false;
        self->plan_count--;
        delete_plan(oldest_plan);
    }
    memmove(self->plans + 1, self->plans, (size_t)self->plan_count * sizeof *self->plans);
    self->plans[0] = new_plan;
    self->plan_count++;
    return true;
}

/* Delete the first plan, which find_plan() returned last. */
static void remove_first_plan(FastCall *self)
{
    delete_plan(self->plans[0]);
    self->plan_count--;
    memmove(self->plans, self->plans + 1, (size_t)self->plan_count * sizeof *self->plans);
}

/* Read the indices of result operands, and of the operands that the kernel writes. */
static bool prepare_results(prepared_launch *plan, PyObject *results)
{
    plan->result_count = (int)PyTuple_GET_SIZE(results);
    if (plan->result_count > MAX_OPERANDS)
        return false;
    for (int i = 0; i < plan->result_count; i++) {
        long index = PyLong_AsLong(PyTuple_GET_ITEM(results, i));
        if (index < 0 || index >= plan->operand_count)
            return false;
        plan->results[i] = (int)index;
        plan->is_output[index] = true;
    }
    return true;
}

PyObject *prepare(PyObject *object, PyObject *args)
{
    FastCall *self = (FastCall *)object;
    PyObject *inputs, *outputs, *allocate, *results, *parameters;
    unsigned long long function, context, stream, scratch, counter_step;
    int device;
    unsigned blocks, threads;

    if (!PyArg_ParseTuple(args, "O!O!OO!O!KKiIIKKK", &PyTuple_Type, &inputs, &PyTuple_Type, &outputs, &allocate,
                          &PyTuple_Type, &results, &PyTuple_Type, &parameters, &function, &context, &device,
                          &blocks, &threads, &stream, &scratch, &counter_step))
        return NULL;
    if (!driver.launch || PyTuple_GET_SIZE(inputs) != self->input_count ||
        PyTuple_GET_SIZE(outputs) != self->output_count)
        Py_RETURN_FALSE;
    prepared_launch *plan = PyMem_Calloc(1, sizeof *plan);
    if (!plan)
        return PyErr_NoMemory();
    plan->allocates = allocate != Py_None;
    plan->allocate = plan->allocates ? Py_NewRef(allocate) : NULL;
    plan->counter_step = counter_step;
    plan->function = (handle)(uintptr_t)function;
    plan->context = (handle)(uintptr_t)context;
    plan->device_id = device;
    plan->blocks = blocks;
    plan->threads = threads;
    plan->uses_scratch = scratch != 0;
    bool is_prepared = prepare_operands(self, plan, inputs, outputs) && prepare_results(plan, results) &&
                       prepare_parameters(plan, parameters, self->counter != NULL);
    if (is_prepared) {
        prepared_launch *existing_plan = find_plan(self, plan->key, plan->key_words, plan->allocates);
        if (existing_plan && existing_plan->function != plan->function && !existing_plan->active_calls) {
            /* another kernel now performs equal calls, such as one that reads the counter from device memory */
            remove_first_plan(self);
            existing_plan = NULL;
        }
        add_scratch(existing_plan ? existing_plan : plan, (handle)(uintptr_t)stream, scratch);
        is_prepared = existing_plan || insert_plan(self, plan);
        if (!existing_plan && is_prepared)
            plan = NULL;
    }
    delete_plan(plan);
    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(is_prepared);
}
