#include "access.h"

#include <string.h>

/* ---- clocks ----------------------------------------------------------------------------------------------- */

int clock_load(struct clock *clock, PyObject *list)
{
    if (list == clock->list)
        return 0;
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "a clock must be a list");
        return -1;
    }
    Py_CLEAR(clock->list); /* the ticks are invalid until all are copied */
    Py_ssize_t width = PyList_GET_SIZE(list);
    if (width > clock->capacity) {
        uint64_t *ticks = PyMem_Realloc(clock->ticks, (size_t)width * sizeof *ticks);
        if (!ticks) {
            PyErr_NoMemory();
            return -1;
        }
        clock->ticks = ticks;
        clock->capacity = width;
    }
    for (Py_ssize_t slot = 0; slot < width; slot++) {
        clock->ticks[slot] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(list, slot));
        if (clock->ticks[slot] == (uint64_t)-1 && PyErr_Occurred())
            return -1;
    }
    clock->width = width;
    clock->list = Py_NewRef(list);
    return 0;
}

void clock_release(struct clock *clock)
{
    PyMem_Free(clock->ticks);
    clock->ticks = NULL;
    clock->width = clock->capacity = 0;
    Py_CLEAR(clock->list);
}

/* ---- operations ------------------------------------------------------------------------------------------- */

/* Read an attribute that is an integer. Return -1 with an exception on errors. */
static int read_integer(PyObject *object, const char *name, long long *result)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    if (!value)
        return -1;
    *result = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return *result == -1 && PyErr_Occurred() ? -1 : 0;
}

struct operation *operation_new(PyObject *call)
{
    struct operation *operation = PyMem_Malloc(sizeof *operation);
    long long seq;
    if (!operation) {
        PyErr_NoMemory();
        return NULL;
    }
    if (read_integer(call, "seq", &seq) || read_integer(call, "kind", &operation->kind) ||
        read_integer(call, "name", &operation->name) || read_integer(call, "site", &operation->site) ||
        read_integer(call, "node", &operation->node) ||
        read_integer(call, "program_call", &operation->program_call)) {
        PyMem_Free(operation);
        return NULL;
    }
    operation->seq = (uint64_t)seq;
    operation->reference_count = 1;
    operation->call = Py_NewRef(call);
    operation->launch = NULL;
    operation->position = NO_NODE;
    return operation;
}

struct operation *operation_new_in_launch(PyObject *node_call, const struct packed_node *node,
                                          const struct operation *launch)
{
    struct operation *operation = PyMem_Malloc(sizeof *operation);
    if (!operation) {
        PyErr_NoMemory();
        return NULL;
    }
    /* the same changes as in Call.in_launch() */
    *operation = (struct operation){.reference_count = 1,
                                    .call = Py_NewRef(node_call),
                                    .launch = Py_NewRef(launch->call),
                                    .seq = launch->seq,
                                    .kind = node->kind,
                                    .name = node->name,
                                    .site = node->site ? node->site : launch->site,
                                    .node = node->node,
                                    .program_call = launch->program_call,
                                    .position = node->position < NO_NODE ? (uint32_t)node->position : NO_NODE};
    return operation;
}

PyObject *operation_call(struct operation *operation)
{
    if (operation->launch) {
        PyObject *call = PyObject_CallMethod(operation->call, "in_launch", "O", operation->launch);
        if (!call)
            return NULL;
        Py_SETREF(operation->call, call);
        Py_CLEAR(operation->launch);
    }
    return operation->call;
}

void operation_release(struct operation *operation)
{
    if (operation && --operation->reference_count == 0) {
        Py_DECREF(operation->call);
        Py_XDECREF(operation->launch);
        PyMem_Free(operation);
    }
}

/* ---- accesses --------------------------------------------------------------------------------------------- */

struct access *access_new(struct operation *operation, uint32_t slot, uint64_t tick, uint64_t lo, uint64_t hi,
                          uint8_t mode, uint8_t precision)
{
    struct access *access = PyMem_Malloc(sizeof *access);
    if (!access) {
        PyErr_NoMemory();
        return NULL;
    }
    operation->reference_count++;
    *access = (struct access){.reference_count = 1,
                              .slot = slot,
                              .tick = tick,
                              .lo = lo,
                              .hi = hi,
                              .operation = operation,
                              .mode = mode,
                              .precision = precision};
    return access;
}

void access_release(struct access *access)
{
    if (access && --access->reference_count == 0) {
        operation_release(access->operation);
        Py_XDECREF(access->object);
        PyMem_Free(access);
    }
}

PyObject *access_object(struct access *access, PyObject *type)
{
    PyObject *call = access->object ? NULL : operation_call(access->operation);
    if (call)
        access->object =
            PyObject_CallFunction(type, "IKOKKBBK", access->slot, (unsigned long long)access->tick, call,
                                  (unsigned long long)access->lo, (unsigned long long)access->hi, access->mode,
                                  access->precision, (unsigned long long)access->accessed_bytes);
    return access->object;
}

int access_set_accessed_bytes(struct access *access, uint64_t accessed_bytes)
{
    access->accessed_bytes = accessed_bytes;
    if (!access->object)
        return 0;
    PyObject *number = PyLong_FromUnsignedLongLong(accessed_bytes);
    int result = number ? PyObject_SetAttrString(access->object, "accessed_bytes", number) : -1;
    Py_XDECREF(number);
    return result;
}

bool accesses_are_equivalent(const struct access *first, const struct access *second)
{
    if (first == second)
        return true;
    if (!first || !second || first->slot != second->slot || first->tick != second->tick ||
        first->mode != second->mode || first->precision != second->precision || first->tick == TICK_NEVER)
        return false;
    const struct operation *operation = first->operation, *second_operation = second->operation;
    return operation == second_operation ||
           (operation->kind == second_operation->kind && operation->name == second_operation->name &&
            operation->site == second_operation->site && operation->node == second_operation->node &&
            operation->program_call == second_operation->program_call);
}

/* ---- lists of accesses ------------------------------------------------------------------------------------ */

void access_list_clear(struct access_list *list)
{
    struct access_list old_list = *list;
    *list = (struct access_list){0};
    struct access *const *items = access_list_items(&old_list);
    for (uint32_t i = 0; i < old_list.access_count; i++)
        access_release(items[i]);
    if (old_list.access_count > 1)
        PyMem_Free(old_list.accesses);
}

int access_list_copy(struct access_list *new_list, const struct access_list *list)
{
    *new_list = *list;
    if (list->access_count > 1) {
        new_list->accesses = PyMem_Malloc(list->access_count * sizeof(struct access *));
        if (!new_list->accesses) {
            new_list->access_count = 0;
            PyErr_NoMemory();
            return -1;
        }
        memcpy(new_list->accesses, list->accesses, list->access_count * sizeof *list->accesses);
    }
    struct access *const *items = access_list_items(new_list);
    for (uint32_t i = 0; i < new_list->access_count; i++)
        access_share(items[i]);
    return 0;
}

/* Remove the accesses of a list that happen before the clock. */
static void remove_ordered(struct access_list *list, const struct clock *clock)
{
    if (list->access_count <= 1) {
        if (list->access_count && access_is_ordered(list->single, clock))
            access_list_clear(list);
        return;
    }
    struct access **items = list->accesses;
    uint32_t remaining_count = 0;
    for (uint32_t i = 0; i < list->access_count; i++) {
        if (access_is_ordered(items[i], clock))
            access_release(items[i]);
        else
            items[remaining_count++] = items[i];
    }
    list->access_count = remaining_count;
    if (remaining_count == 1)
        list->single = items[0];
    if (remaining_count <= 1)
        PyMem_Free(items);
}

int access_list_replace_ordered(struct access_list *list, const struct clock *clock, struct access *new_access)
{
    remove_ordered(list, clock);
    if (!new_access)
        return 0;
    if (!list->access_count) {
        *list = (struct access_list){.access_count = 1, .single = access_share(new_access)};
        return 0;
    }
    struct access **old_items = list->access_count > 1 ? list->accesses : NULL;
    struct access **items = PyMem_Realloc(old_items, (list->access_count + 1) * sizeof(struct access *));
    if (!items) {
        PyErr_NoMemory();
        return -1;
    }
    if (!old_items)
        items[0] = list->single;
    items[list->access_count++] = access_share(new_access);
    list->accesses = items;
    return 0;
}

bool access_lists_are_equivalent(const struct access_list *first, const struct access_list *second)
{
    if (first->access_count != second->access_count)
        return false;
    struct access *const *items = access_list_items(first), *const *second_items = access_list_items(second);
    for (uint32_t i = 0; i < first->access_count; i++)
        if (!accesses_are_equivalent(items[i], second_items[i]))
            return false;
    return true;
}
