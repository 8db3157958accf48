/* Where the slots of the allocator's classes lie. */
#include "slots.h"

#include <stddef.h>
#include <structmember.h>

#define ROOM "cudakit.core.memory.allocator."

Py_ssize_t slot_offsets[SLOT_COUNT];

static const struct {
    const char *module, *class, *slot;
} names[SLOT_COUNT] = {
#define X(module, class, slot) {ROOM #module, #class, #slot},
    SLOTS(X)
#undef X
};

static Py_ssize_t offset_of(PyObject *descriptor)
{
    if (!Py_IS_TYPE(descriptor, &PyMemberDescr_Type))
        return -1;
    PyMemberDef *member = ((PyMemberDescrObject *)descriptor)->d_member;
    return member->type == T_OBJECT_EX ? member->offset : -1;
}

static bool find(int number)
{
    PyObject *module = PyImport_ImportModule(names[number].module);
    PyObject *class = module ? PyObject_GetAttrString(module, names[number].class) : NULL;
    PyObject *descriptor = class ? PyObject_GetAttrString(class, names[number].slot) : NULL;
    Py_ssize_t offset = descriptor ? offset_of(descriptor) : -1;
    if (module && offset < 0) /* what was built for other sources is of no use */
        PyErr_Format(PyExc_ImportError, "%s has no slot %s", names[number].class, names[number].slot);
    slot_offsets[number] = offset;
    Py_XDECREF(descriptor);
    Py_XDECREF(class);
    Py_XDECREF(module);
    return offset >= 0;
}

bool find_slots(void)
{
    for (int number = 0; number < SLOT_COUNT; number++)
        if (!find(number))
            return false;
    return true;
}
