/* A free: to where it is found first, or into its pool, merged with its neighbours. hot_path.py says what both are. */
#include "counts.h"
#include "rows.h"
#include "stock.h"

/* Whether nobody uses a live block but the stream it is of. */
static bool is_alone(PyObject *block, const struct release *release)
{
    bool odd = false;
    PyObject *others = get(block, Block_other_streams);
    if (others != Py_None && PyDict_GET_SIZE(others) != 0)
        return false;
    return !release->has_stream ||
           (release->stream == number(get(block, Block_row), FreeBlocks_stream, &odd) && !odd);
}

/* ---- the front cache ---------------------------------------------------------------------------- */

PyObject *free_to_bin(struct calls *calls, const struct release *release)
{
    PyObject *block = PyDict_GetItemWithError(calls->live, release->ptr);
    PyObject *bin = block ? get(block, Block_bin) : Py_None;
    if (bin == Py_None || PyList_GET_SIZE(bin) >= calls->most || PySet_GET_SIZE(calls->unusual) ||
        !is_alone(block, release))
        return NULL;
    struct changes changes;
    begin(&changes);
    if (is_true(calls->front, FrontCache_counts)) {
        will_discharge(&changes, calls->ledger, block);
        will_be(&changes, block, Block_counted, Py_False);
    }
    bool done = !changes.failed && PyList_Append(bin, block) == 0;
    if (done) {
        make(&changes);
        PyDict_DelItem(calls->live, release->ptr);
    }
    forget(&changes);
    return done ? Py_NewRef(Py_None) : NULL;
}

/* ---- the pools ---------------------------------------------------------------------------------- */

/* A block that is about to be free, with the free neighbours that it will be one with. */
struct merger {
    struct changes changes;
    PyObject *row, *pool, *tally;
    PyObject *block, *before, *after; /* neighbours that are not free are NULL */
    PyObject *left, *right;           /* neighbours of the whole; Py_None where it ends the segment */
    struct spot spots[2];             /* where these neighbours are */
    int64_t bytes, pieces, piece_bytes;
    struct key key; /* of the whole */
    PyObject *entry;
};

static bool find_neighbour(struct merger *merger, PyObject *block, struct spot *spot)
{
    bool odd = false;
    struct key key = {number(block, Block_size, &odd), number(block, Block_ptr, &odd)};
    merger->bytes += key.size;
    merger->pieces -= 1;
    merger->piece_bytes -= key.size;
    return row_find(merger->row, block, key, spot) && !odd;
}

/* Return a neighbour if it is free. */
static PyObject *free_one(PyObject *block)
{
    return block != Py_None && is_true(block, Block_free) ? block : NULL;
}

static bool find_neighbours(struct merger *merger)
{
    merger->left = get(merger->block, Block_previous);
    merger->right = get(merger->block, Block_next);
    PyObject *before = merger->before = free_one(merger->left);
    PyObject *after = merger->after = free_one(merger->right);
    if (before)
        merger->left = get(before, Block_previous);
    if (after)
        merger->right = get(after, Block_next);
    merger->pieces = merger->piece_bytes = 0;
    merger->spots[0].part = merger->spots[1].part = NULL;
    return (!after || find_neighbour(merger, after, &merger->spots[0])) &&
           (!before || find_neighbour(merger, before, &merger->spots[1]));
}

/* Find what is to be freed, and what it will be merged with; false where something is not usual. */
static bool find_merger(struct merger *merger, struct calls *calls, const struct release *release)
{
    bool odd = false;
    PyObject *block = PyDict_GetItemWithError(calls->live, release->ptr);
    if (!block || !is_alone(block, release))
        return false;
    merger->block = block;
    merger->row = get(block, Block_row);
    merger->pool = get(merger->row, FreeBlocks_pool);
    merger->tally = get(merger->pool, Pool_tally);
    merger->bytes = number(block, Block_size, &odd);
    return merger->bytes < number(calls->cache, Cache_max_split_bytes, &odd) && !odd &&
           Py_IS_TYPE(merger->tally, calls->tally_class) && find_neighbours(merger);
}

/* Note what becomes of the blocks. */
static bool will_merge(struct merger *merger, struct calls *calls, struct stock *stock)
{
    struct changes *changes = &merger->changes;
    PyObject *block = merger->block, *base = merger->before ? merger->before : block;
    PyObject *size = PyLong_FromLongLong(merger->bytes);
    bool odd = false;
    merger->key = (struct key){merger->bytes, number(base, Block_ptr, &odd)};
    if (!size || odd) {
        Py_XDECREF(size);
        return false;
    }
    merger->entry = entry_of(stock, size, get(base, Block_ptr), base);
    will_take(changes, base, Block_size, size);
    will_be(changes, block, Block_allocated, Py_False);
    will_be(changes, block, Block_stack, Py_None);
    if (merger->after)
        will_be(changes, merger->after, Block_free, Py_False);
    if (merger->after || merger->before) {
        will_be(changes, base, Block_next, merger->right);
        if (merger->right != Py_None)
            will_be(changes, merger->right, Block_previous, base);
        will_be(changes, calls->cache, Cache__spare, merger->before ? block : merger->after);
    }
    if (merger->before)
        will_be(changes, base, Block_requested, get(block, Block_requested));
    will_be(changes, base, Block_free, Py_True);
    will_be(changes, base, Block_age_base, get(merger->pool, Pool_searches));
    return true;
}

/* Note all that changes; false where something is not usual. */
static bool will_free(struct merger *merger, struct calls *calls, struct stock *stock)
{
    struct changes *changes = &merger->changes;
    PyObject *block = merger->block, *requested = get(block, Block_requested);
    bool whole = merger->left == Py_None && merger->right == Py_None;
    int64_t pieces = merger->pieces + !whole;
    int64_t bytes = merger->piece_bytes + (whole ? 0 : merger->bytes);
    will_discharge(changes, calls->ledger, block);
    return will_merge(merger, calls, stock) && will_count_pieces(changes, merger->tally, pieces, bytes) &&
           (!stock->recorder || will_record(changes, stock, FREE_REQUESTED, block, requested));
}

/* Do what may fail, and then all the rest. */
static bool put_back(struct merger *merger, struct calls *calls, struct stock *stock, PyObject *ptr)
{
    if (merger->changes.failed || !row_exchange(merger->row, merger->spots, merger->key, merger->entry))
        return false;
    merger->entry = NULL;
    make(&merger->changes);
    PyDict_DelItem(calls->live, ptr);
    record(stock);
    return true;
}

PyObject *free_to_pool(struct calls *calls, const struct release *release)
{
    struct merger merger;
    struct stock stock;
    begin(&merger.changes);
    merger.entry = NULL;
    bool done = stock_up(&stock, calls, 2) && is_usual(&stock, calls) && find_merger(&merger, calls, release) &&
                will_free(&merger, calls, &stock) && put_back(&merger, calls, &stock, release->ptr);
    forget(&merger.changes);
    Py_XDECREF(merger.entry);
    stock_drop(&stock);
    return done ? Py_NewRef(Py_None) : NULL;
}
