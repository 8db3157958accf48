#include "counts.h"

/* What lies where in the ledger: lanes of as many metrics for each kind of pools, and for all. */
enum { LANE_BYTES = 10, METRICS = 3, ALL = 2, KINDS = 3 };

static PyObject *above_peak;

bool find_constants(void)
{
    PyObject *ledger = PyImport_ImportModule("cudakit.core.memory.allocator.ledger");
    PyObject *bits = ledger ? PyObject_GetAttrString(ledger, "LANE_BITS") : NULL;
    Py_XSETREF(above_peak, bits ? PyObject_GetAttrString(ledger, "ABOVE_PEAK") : NULL);
    if (above_peak && PyLong_AsLong(bits) != 8 * LANE_BYTES)
        PyErr_SetString(PyExc_ImportError, "the ledger has other lanes");
    Py_XDECREF(bits);
    Py_XDECREF(ledger);
    return !PyErr_Occurred();
}

/* ---- pieces ------------------------------------------------------------------------------------- */

struct metric {
    enum slot now, added, peak;
};

static const struct metric PIECES = {
    Tally_inactive_split, Tally_inactive_split_added, Peaks_inactive_split_peak};
static const struct metric BYTES = {
    Tally_inactive_split_bytes, Tally_inactive_split_bytes_added, Peaks_inactive_split_bytes_peak};

static bool will_change(struct changes *changes, PyObject *tally, const struct metric *metric, int64_t by)
{
    bool odd = false;
    int64_t value = number(tally, metric->now, &odd) + by;
    will_count(changes, tally, metric->now, value);
    if (by <= 0)
        return !odd;
    will_count(changes, tally, metric->added, number(tally, metric->added, &odd) + by);
    if (value > number(tally, metric->peak, &odd))
        will_count(changes, tally, metric->peak, value);
    PyObject *whole = get(tally, Tally_whole);
    value += number(get(tally, Tally_other), metric->now, &odd);
    if (value > number(whole, metric->peak, &odd))
        will_count(changes, whole, metric->peak, value);
    return !odd;
}

bool will_count_pieces(struct changes *changes, PyObject *tally, int64_t count, int64_t bytes)
{
    return (count == 0 || will_change(changes, tally, &PIECES, count)) &&
           (bytes == 0 || will_change(changes, tally, &BYTES, bytes));
}

/* ---- the ledger --------------------------------------------------------------------------------- */

/* Return what a block weighs; in Python that is a sum of products, but those look for signals. */
static PyObject *weight_from(PyObject *tally, PyObject *size, PyObject *requested)
{
    bool odd = false;
    int64_t kind = number(tally, Tally_kind, &odd);
    uint64_t counts[METRICS] = {1, (uint64_t)number_of(size, &odd), (uint64_t)number_of(requested, &odd)};
    unsigned char lanes[KINDS][METRICS][LANE_BYTES] = {0};
    for (int metric = 0; metric < METRICS; metric++)
        for (int byte = 0; byte < 8; byte++)
            lanes[kind][metric][byte] = lanes[ALL][metric][byte] = (unsigned char)(counts[metric] >> 8 * byte);
    if (odd)
        return NULL;
#if PY_VERSION_HEX >= 0x030D0000
    return PyLong_FromNativeBytes(lanes, sizeof lanes,
                                  Py_ASNATIVEBYTES_LITTLE_ENDIAN | Py_ASNATIVEBYTES_UNSIGNED_BUFFER);
#else
    return _PyLong_FromByteArray(&lanes[0][0][0], sizeof lanes, 1, 0);
#endif
}

static bool are_equal(PyObject *one, PyObject *other)
{
    bool odd = false;
    return one == other || (number_of(one, &odd) == number_of(other, &odd) && !odd);
}

/* Return what a block weighs; a new reference. */
static PyObject *weight_of(struct changes *changes, PyObject *block, PyObject *tally, PyObject *size,
                           PyObject *requested)
{
    PyObject *weight = get(block, Block_weight);
    if (are_equal(get(block, Block_weighed_size), size) &&
        are_equal(get(block, Block_weighed_request), requested))
        return Py_NewRef(weight);
    weight = weight_from(tally, size, requested);
    if (!weight)
        return NULL;
    will_be(changes, block, Block_weight, weight);
    will_be(changes, block, Block_weighed_size, size);
    will_be(changes, block, Block_weighed_request, requested);
    return weight;
}

static bool will_use(struct changes *changes, PyObject *ledger, PyObject *weight)
{
    PyObject *used = PyNumber_Add(get(ledger, Ledger_used), weight);
    PyObject *above = used ? PyNumber_And(used, above_peak) : NULL;
    bool rises = !above || PyObject_IsTrue(above);
    Py_XDECREF(above);
    will_take(changes, ledger, Ledger_used, used);
    return !rises;
}

PyObject *will_charge(struct changes *changes, PyObject *block, PyObject *tally, PyObject *size,
                      PyObject *requested)
{
    bool odd = false;
    PyObject *ledger = get(tally, Tally_ledger);
    if (number(ledger, Ledger_pending, &odd) != 0 || odd)
        return NULL;
    PyObject *weight = weight_of(changes, block, tally, size, requested);
    if (weight && will_use(changes, ledger, weight)) {
        will_take(changes, ledger, Ledger_added, PyNumber_Add(get(ledger, Ledger_added), weight));
        return weight;
    }
    Py_XDECREF(weight);
    return NULL;
}

bool will_charge_again(struct changes *changes, PyObject *ledger, PyObject *block)
{
    return will_use(changes, ledger, get(block, Block_weight));
}

void will_discharge(struct changes *changes, PyObject *ledger, PyObject *block)
{
    will_take(changes, ledger, Ledger_used,
              PyNumber_Subtract(get(ledger, Ledger_used), get(block, Block_weight)));
}
