/* An allocation: of what was freed last, or the best fit of a pool. hot_path.py says what both are. */
#include "counts.h"
#include "rows.h"
#include "stock.h"

/* As in sizes.py. */
enum { SMALLEST_BLOCK = 512, MOST_SMALL = 1 << 20 };
static const int64_t TOO_MANY_BYTES = (int64_t)1 << 60;

/* ---- the front cache ---------------------------------------------------------------------------- */

static PyObject *bin_for(struct calls *calls, const struct request *request)
{
    PyObject *bins = get(calls->front, FrontCache_default);
    if (request->stream)
        bins = PyDict_GetItemWithError(get(calls->front, FrontCache__others), request->stream_object);
    return bins ? PyDict_GetItemWithError(bins, request->size_object) : NULL;
}

static bool will_leave(struct changes *changes, struct calls *calls, PyObject *block)
{
    bool odd = false;
    PyObject *tab = get(block, Block_tab);
    will_count(changes, tab, Tab_times, number(tab, Tab_times, &odd) + 1);
    if (is_true(block, Block_counted))
        return !odd;
    will_be(changes, block, Block_counted, Py_True);
    return !odd && will_charge_again(changes, calls->ledger, block);
}

PyObject *alloc_from_bin(struct calls *calls, const struct request *request)
{
    PyObject *bin = PySet_GET_SIZE(calls->unusual) ? NULL : bin_for(calls, request);
    Py_ssize_t last = bin ? PyList_GET_SIZE(bin) - 1 : -1;
    if (last < 0)
        return NULL;
    struct changes changes;
    begin(&changes);
    PyObject *block = PyList_GET_ITEM(bin, last), *ptr = get(block, Block_ptr);
    bool done = will_leave(&changes, calls, block) && !changes.failed &&
                PyDict_SetItem(calls->live, ptr, block) == 0;
    if (done) {
        make(&changes);
        Py_SET_SIZE(bin, last);
        Py_DECREF(block); /* the bin's; it is live */
    }
    forget(&changes);
    return done ? Py_NewRef(ptr) : NULL;
}

/* ---- the pools ---------------------------------------------------------------------------------- */

/* A free block that is about to be handed out, and what will be left of it. */
struct grant {
    struct changes changes;
    PyObject *row, *pool, *tally, *block;
    struct spot spots[2]; /* where the block is; the second is none */
    int64_t bytes;        /* that the block has */
    int64_t size;         /* of what is handed out */
    PyObject *size_object;
    struct key key; /* of the rest */
    PyObject *entry; /* NULL where all is handed out */
};

/* Find the best fit; false where there is none, or it takes more than a search. */
static bool find_block(struct grant *grant, struct calls *calls, const struct request *request)
{
    bool odd = false;
    PyObject *cache = calls->cache;
    if (!is_true(cache, Cache_simple) || PyObject_IsTrue(get(cache, Cache_divisions)))
        return false;
    grant->size = (request->size + SMALLEST_BLOCK - 1) & -SMALLEST_BLOCK;
    grant->pool = grant->size <= MOST_SMALL ? calls->small : calls->large;
    grant->tally = get(grant->pool, Pool_tally);
    grant->row = PyDict_GetItemWithError(get(grant->pool, Pool_rows), request->stream_object);
    if (!grant->row)
        return false;
    grant->block = row_fit(grant->row, grant->size, &grant->spots[0]);
    grant->spots[1].part = NULL;
    if (!grant->block)
        return false;
    grant->bytes = number(grant->block, Block_size, &odd);
    return grant->bytes < number(cache, Cache_max_split_bytes, &odd) && !odd;
}

/* Note what becomes of the upper part of a block. */
static bool will_split(struct grant *grant, struct calls *calls, struct stock *stock)
{
    struct changes *changes = &grant->changes;
    bool odd = false;
    PyObject *block = grant->block, *rest = get(calls->cache, Cache__spare), *after = get(block, Block_next);
    struct key key = {grant->bytes - grant->size, number(block, Block_ptr, &odd) + grant->size};
    PyObject *ptr = PyLong_FromLongLong(key.ptr), *size = PyLong_FromLongLong(key.size);
    if (!ptr || !size || odd || rest == Py_None) {
        Py_XDECREF(ptr);
        Py_XDECREF(size);
        return false;
    }
    grant->key = key;
    grant->entry = entry_of(stock, size, ptr, rest);
    will_take(changes, rest, Block_ptr, ptr);
    will_take(changes, rest, Block_size, size);
    will_be(changes, rest, Block_row, grant->row);
    will_be(changes, rest, Block_requested, get(block, Block_requested));
    will_be(changes, rest, Block_origin, get(block, Block_origin));
    will_be(changes, rest, Block_previous, block);
    will_be(changes, rest, Block_next, after);
    will_be(changes, rest, Block_free, Py_True);
    will_be(changes, rest, Block_age_base, get(grant->pool, Pool_searches));
    will_be(changes, block, Block_origin, Py_None);
    will_be(changes, block, Block_next, rest);
    will_be(changes, block, Block_size, grant->size_object);
    will_be(changes, calls->cache, Cache__spare, Py_None);
    if (after != Py_None)
        will_be(changes, after, Block_previous, rest);
    if (after != Py_None || !is_none(block, Block_previous))
        return will_count_pieces(changes, grant->tally, 0, -grant->size);
    return will_count_pieces(changes, grant->tally, 1, key.size);
}

/* Note which part of the block is handed out. */
static bool will_cut(struct grant *grant, struct calls *calls, struct stock *stock)
{
    bool odd = false;
    bool splits = grant->bytes - grant->size > number(grant->pool, Pool_slack_bytes, &odd) &&
                  grant->size < number(calls->cache, Cache_unsplit_bytes, &odd) &&
                  is_true(grant->pool, Pool_splits);
    if (odd)
        return false;
    if (splits)
        return will_split(grant, calls, stock);
    Py_SETREF(grant->size_object, Py_NewRef(get(grant->block, Block_size)));
    if (is_none(grant->block, Block_next) && is_none(grant->block, Block_previous))
        return true;
    return will_count_pieces(&grant->changes, grant->tally, -1, -grant->bytes);
}

/* Note which bin of the front cache a block goes to when it is freed; false where there is none yet. */
static bool will_return(struct changes *changes, struct calls *calls, const struct request *request,
                        PyObject *block, PyObject *weight)
{
    if (!calls->most)
        return true;
    PyObject *bin = bin_for(calls, request);
    PyObject *tab = bin ? PyDict_GetItemWithError(get(calls->ledger, Ledger__tabs), weight) : NULL;
    if (!tab)
        return false;
    will_be(changes, block, Block_bin, bin);
    will_be(changes, block, Block_tab, tab);
    return true;
}

/* Note all that changes; false where something is not usual. */
static bool will_hand_out(struct grant *grant, struct calls *calls, const struct request *request,
                          struct stock *stock)
{
    struct changes *changes = &grant->changes;
    PyObject *block = grant->block, *requested = request->size_object;
    grant->size_object = grant->size == request->size ? Py_NewRef(requested) : PyLong_FromLongLong(grant->size);
    if (!grant->size_object || !will_cut(grant, calls, stock))
        return false;
    PyObject *weight = will_charge(changes, block, grant->tally, grant->size_object, requested);
    bool right = weight && will_return(changes, calls, request, block, weight);
    Py_XDECREF(weight);
    if (!right)
        return false;
    will_be(changes, block, Block_free, Py_False);
    will_be(changes, block, Block_allocated, Py_True);
    will_be(changes, block, Block_requested, requested);
    return !stock->recorder || will_record(changes, stock, ALLOC, block, requested);
}

/* Do what may fail, and then all the rest. */
static bool hand_out(struct grant *grant, struct calls *calls, struct stock *stock)
{
    PyObject *block = grant->block, *ptr = get(block, Block_ptr);
    if (grant->changes.failed || PyDict_SetItem(calls->live, ptr, block) != 0)
        return false;
    if (!row_exchange(grant->row, grant->spots, grant->key, grant->entry)) {
        PyDict_DelItem(calls->live, ptr);
        return false;
    }
    grant->entry = NULL;
    make(&grant->changes);
    record(stock);
    return true;
}

PyObject *alloc_from_pool(struct calls *calls, const struct request *request)
{
    if (request->size <= 0 || request->size >= TOO_MANY_BYTES || request->stream == PER_THREAD)
        return NULL;
    struct grant grant;
    struct stock stock;
    begin(&grant.changes);
    grant.size_object = grant.entry = NULL;
    PyObject *ptr = NULL;
    if (stock_up(&stock, calls, 1) && keep_spare(calls) && is_usual(&stock, calls) && find_block(&grant, calls, request) && will_hand_out(&grant, calls, request, &stock) &&
        hand_out(&grant, calls, &stock))
        ptr = Py_NewRef(get(grant.block, Block_ptr));
    forget(&grant.changes);
    Py_XDECREF(grant.size_object);
    Py_XDECREF(grant.entry);
    stock_drop(&stock);
    return ptr;
}
