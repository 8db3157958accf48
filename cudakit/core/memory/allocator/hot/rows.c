#include "rows.h"

#include <string.h>

/* A longer part is divided in two, which is done in Python. */
enum { MOST_IN_PART = 1024, ANY_PTR = -1 };

static PyObject **items_of(PyObject *part)
{
    return ((PyListObject *)part)->ob_item;
}

static struct key key_of(PyObject *entry)
{
    bool odd = false; /* what was put there fits */
    return (struct key){number_of(PyTuple_GET_ITEM(entry, 0), &odd),
                        number_of(PyTuple_GET_ITEM(entry, 1), &odd)};
}

static bool is_below(PyObject *entry, struct key key)
{
    struct key own = key_of(entry);
    return own.size != key.size ? own.size < key.size : own.ptr < key.ptr;
}

/* Return the part that has the first entry not below a key; the last where none has. */
static PyObject *part_of(PyObject *row, struct key key)
{
    PyObject *part = get(row, FreeBlocks_part);
    if (part != Py_None)
        return part;
    PyObject *parts = get(row, FreeBlocks_parts);
    Py_ssize_t low = 0, high = PyList_GET_SIZE(parts) - 1;
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        part = PyList_GET_ITEM(parts, middle);
        if (is_below(PyList_GET_ITEM(part, PyList_GET_SIZE(part) - 1), key))
            low = middle + 1;
        else
            high = middle;
    }
    return PyList_GET_ITEM(parts, low);
}

/* Return where the first entry is that is not below a key, or would be. */
static struct spot find(PyObject *row, struct key key)
{
    PyObject *part = part_of(row, key);
    Py_ssize_t low = 0, high = PyList_GET_SIZE(part);
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        if (is_below(PyList_GET_ITEM(part, middle), key))
            low = middle + 1;
        else
            high = middle;
    }
    return (struct spot){part, low};
}

static PyObject *block_at(struct spot spot)
{
    return PyTuple_GET_ITEM(PyList_GET_ITEM(spot.part, spot.index), 2);
}

PyObject *row_fit(PyObject *row, int64_t size, struct spot *spot)
{
    *spot = find(row, (struct key){size, ANY_PTR});
    return spot->index < PyList_GET_SIZE(spot->part) ? block_at(*spot) : NULL;
}

bool row_find(PyObject *row, PyObject *block, struct key key, struct spot *spot)
{
    PyObject *part = get(row, FreeBlocks_part);
    if (part != Py_None && PyList_GET_SIZE(part) != 0) { /* more often than not it is the largest */
        *spot = (struct spot){part, PyList_GET_SIZE(part) - 1};
        if (block_at(*spot) == block)
            return true;
    }
    *spot = find(row, key);
    return spot->index < PyList_GET_SIZE(spot->part) && block_at(*spot) == block;
}

/* Put an entry in place of another of the same part, where it belongs. */
static void replace(struct spot old, Py_ssize_t to, PyObject *entry)
{
    PyObject **items = items_of(old.part), *gone = items[old.index];
    Py_ssize_t from = old.index;
    if (to <= from) {
        memmove(items + to + 1, items + to, (size_t)(from - to) * sizeof *items);
    } else {
        to--;
        memmove(items + from, items + from + 1, (size_t)(to - from) * sizeof *items);
    }
    items[to] = entry;
    Py_DECREF(gone);
}

static void take_out(struct spot spot)
{
    Py_ssize_t length = PyList_GET_SIZE(spot.part) - 1;
    PyObject **items = items_of(spot.part), *gone = items[spot.index];
    memmove(items + spot.index, items + spot.index + 1, (size_t)(length - spot.index) * sizeof *items);
    Py_SET_SIZE(spot.part, length);
    Py_DECREF(gone);
}

static bool insert(struct spot to, PyObject *entry)
{
    if (PyList_GET_SIZE(to.part) >= MOST_IN_PART || PyList_Insert(to.part, to.index, entry) != 0)
        return false;
    Py_DECREF(entry);
    return true;
}

/* Whether a part has entries left, whatever leaves it beside; a row may be empty, one of its parts may not. */
static bool may_leave(PyObject *row, struct spot spot)
{
    return !is_none(row, FreeBlocks_part) || PyList_GET_SIZE(spot.part) > 2;
}

/* Say where an entry is when another has been taken out. */
static void shift(struct spot *spot, struct spot gone)
{
    if (spot->part == gone.part && spot->index > gone.index)
        spot->index--;
}

bool row_exchange(PyObject *row, const struct spot leaving[2], struct key key, PyObject *entry)
{
    struct spot to = entry ? find(row, key) : (struct spot){NULL, 0};
    bool second = entry && leaving[1].part == to.part;
    struct spot old = leaving[second], other = leaving[!second];
    bool replaces = entry && old.part == to.part;
    if ((old.part && !may_leave(row, old)) || (other.part && !may_leave(row, other)))
        return false;
    if (entry && !replaces && !insert(to, entry))
        return false;
    if (other.part) {
        take_out(other);
        shift(&old, other);
        shift(&to, other);
    }
    if (replaces)
        replace(old, to.index, entry);
    else if (old.part)
        take_out(old);
    return true;
}
